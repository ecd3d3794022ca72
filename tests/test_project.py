"""The project itself: imports point one way, nothing names this machine, the wheel runs, the docs are true."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "replayssm"

# Each layer may import itself and those before it.
BASE = ("errors", "options", "folders", "bundled", "loading", "tuned")
LAYERS = (*BASE, "recurrence", "backends", "ops", "state", "models", "speculate", "engine", "server")
INTEGRATIONS_MAY_USE = {"ops", "state", "integrations"}
BENCH_MAY_USE = {"", *BASE, "recurrence", "ops", "state", "models", "engine", "bench"}


def imported_parts(source: str, module: str, is_package: bool) -> Iterator[str]:
    """First-level parts of replayssm that a module imports, wherever in it; '' is the package itself."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "replayssm":
                yield rest.split(".")[0]


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a module that point against the layers."""
    part = module.split(".")[1] if "." in module else ""
    if part in LAYERS:
        allowed = set(LAYERS[: LAYERS.index(part) + 1])
    elif part == "integrations":
        allowed = INTEGRATIONS_MAY_USE
    elif part == "bench":
        allowed = BENCH_MAY_USE
    else:
        return []  # the command line and its helpers stand on top of all layers
    return [name for name in imported_parts(source, module, is_package) if name not in allowed]


def package_modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", package_modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert wrong_imports(path.read_text(), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("replayssm.ops.decode", "from replayssm.state import ReplayPool"),
        ("replayssm.ops.decode", "from replayssm import state"),
        ("replayssm.ops.decode", "from ..state import pool"),
        ("replayssm.ops.decode", "def f():\n    import replayssm.models.enable"),
        ("replayssm.recurrence", "from replayssm import ops"),
        ("replayssm.state.pool", "import replayssm"),
        ("replayssm.models.enable", "from replayssm.cli import run"),
        ("replayssm.models.enable", "from replayssm.speculate import Drafter"),
        ("replayssm.speculate.loop", "from replayssm.engine import Engine"),
        ("replayssm.loading.model", "from replayssm.models import enable"),
        ("replayssm.integrations.sglang", "from replayssm.models import enable"),
        ("replayssm.bench.decode", "from replayssm.backends import triton"),
        ("replayssm.bench.decode", "from replayssm.cli.bench import decode"),
        ("replayssm.ops.decode", "from replayssm.bench import check"),
        ("replayssm.integrations.vllm", "from replayssm.backends import triton"),
    ],
)
def test_an_import_that_points_up_is_found(module, source):
    assert wrong_imports(source, module) != []


def test_imports_that_point_down_are_allowed():
    source = "import torch\nfrom replayssm import ops\nfrom replayssm.state.pool import ReplayPool\nfrom . import cache"
    assert wrong_imports(source, "replayssm.models.enable") == []


def tracked_text_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [p for p in paths if p.is_file() and p.suffix not in {".safetensors", ".png"}]


def test_no_tracked_file_names_a_machine_path():
    # The folder that holds the checkout, wherever that is, and homes and temporary folders.
    places = [f"{ROOT.parent}/" if len(str(ROOT.parent)) > 2 else str(ROOT), "/" + "home/", "/" + "root/", "/" + "tmp/"]
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in tracked_text_files()
        for place in places
        if place in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert found == []


def test_no_tracked_document_points_outside_the_repository():
    documents = [p for p in tracked_text_files() if p.suffix == ".md"]
    assert documents
    for path in documents:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in link:
                assert (path.parent / link).resolve().is_relative_to(ROOT), f"{path.name}: {link}"
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_importing_the_package_is_light():
    code = "import replayssm, sys; print([m for m in ('torch', 'transformers', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import replayssm

    for name in replayssm.__all__:
        assert getattr(replayssm, name) is not None
        assert name in dir(replayssm)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = replayssm.nothing


def test_versions_agree():
    import replayssm

    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{replayssm.__version__}"' in metadata


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory):
    """A wheel built without network from a copy of what git tracks, unpacked into an empty folder."""
    pytest.importorskip("setuptools", minversion="77")
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for path in tracked_text_files_and_weights():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    done = subprocess.run([*command, str(wheels), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = wheels.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def tracked_text_files_and_weights() -> list[Path]:
    weights = sorted((PACKAGE / "bundled").rglob("*.safetensors"))
    return [*tracked_text_files(), *weights]


def run_from(site: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "replayssm", *args], cwd=site, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_built_wheel_runs(unpacked_wheel):
    done = run_from(unpacked_wheel, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bundled_models"][0] == "qwen3_5-tiny"
    assert report["installed_at"].startswith(str(unpacked_wheel.resolve()))

    done = run_from(unpacked_wheel, "generate", "--prompt", "def ", "--max-new-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new_tokens"] == 4


def test_a_built_wheel_holds_the_package_only(unpacked_wheel):
    assert {p.name for p in unpacked_wheel.iterdir()} == {"replayssm", "replayssm-0.1.0.dist-info"}
    assert (unpacked_wheel / "replayssm" / "py.typed").is_file()
