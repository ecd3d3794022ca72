"""The documents are true: their commands run, the output that they show is what comes, their Python works."""

import doctest
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from replayssm import cli
from replayssm.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(path.name, line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def commands() -> list[tuple[str, str]]:
    lines = [(str(block), line) for block in blocks("sh") for line in block.text.splitlines()]
    return [(where, line) for where, line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture
def run(capfd):
    """Run a document's command line: gives exit code, standard output and standard error."""

    def run_command(command: str) -> tuple[int, str, str]:
        program, *args = shlex.split(command)
        if program == "replayssm" and "|" not in args:
            capfd.readouterr()  # in this process, which has imported transformers already
            return cli.run(args), *capfd.readouterr()
        command = re.sub(
            r"\breplayssm (?=generate|doctor|demo|chat)", f"{shlex.quote(sys.executable)} -m replayssm ", command
        )
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run_command


@pytest.mark.slow
@pytest.mark.parametrize(("where", "command"), commands())
def test_a_command_of_the_documents_runs(run, where, command):
    code, _, err = run(command)
    assert code == 0, f"{where}: {err}"


def shown_runs() -> list[tuple[str, str, str]]:
    """Command and output that a console block shows."""
    shown = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            shown.append((str(block), command, output))
    return shown


@pytest.mark.parametrize(("where", "command", "output"), shown_runs())
def test_shown_output_is_what_comes(run, where, command, output):
    _, out, err = run(command)
    got = out + err
    assert doctest.OutputChecker().check_output(output, got, doctest.ELLIPSIS), f"{where}: {got}"


@pytest.mark.parametrize("document", [p.name for p in DOCUMENTS])
def test_python_of_a_document_works(document):
    """Its blocks one after the other, as a reader would type them."""
    names = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.document == document:
            exec(compile("\n" * block.line + block.text, document, "exec"), names)


def test_every_file_that_the_documents_name_exists():
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", path.read_text()):
            row = next(line for line in path.read_text().splitlines() if f"`{name}`" in line)
            there = (ROOT / name).exists() or (ROOT / "replayssm" / name).exists()
            assert there or "**planned**" in row, f"{path.name}: {name}"


def anchors(path: Path) -> set[str]:
    """What links may name in a document: its headings, small, with dashes between the words."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_between_the_documents_leads_somewhere():
    for path in [*DOCUMENTS, ROOT / "training" / "README.md"]:
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text()):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_every_make_target_that_the_documents_name_exists():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-gpu", "lint", "bench"} <= targets
    for path in DOCUMENTS:
        named = set(re.findall(r"^ {4}make ([\w-]+)|`make ([\w-]+)`", path.read_text(), re.MULTILINE))
        assert {a or b for a, b in named} <= targets, path.name


def test_no_fence_is_left_untested():
    known = {"sh", "console", "python"}
    for path in DOCUMENTS:
        assert set(re.findall(r"^```(\w+)$", path.read_text(), re.MULTILINE)) <= known, path.name


def option_table(section: str) -> dict[str, str]:
    """What a section of docs/cli.md says of each option, by its name: the default, as it is written there."""
    text = (ROOT / "docs" / "cli.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body is not None, section
    table = {}
    for row in re.findall(r"^\| (`--.*) \|$", body[1], re.MULTILINE):
        cell, default = (part.strip() for part in row.split("|")[:2])
        options = re.findall(r"`(--[\w-]+)[^`]*`", cell)
        defaults = [part.strip() for part in default.split(",")]
        # A row of several options has a default for each of them, or one text for all.
        each = defaults if len(options) == len(defaults) else [default] * len(options)
        table |= dict(zip(options, each, strict=True))
    return table


def options_of(command: str) -> dict[str, Any]:
    """The options of a command, by the name that the documents use, with their defaults."""
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    turned_off = {"compile_first"}  # a flag that is on: what the documents name is its opposite
    return {
        (p.secondary_opts if p.name in turned_off else p.opts)[0]: p.default
        for p in found.params
        if p.opts[0] != "--help"
    }


SECTIONS = ("generate", "serve", "chat", "tune", "bench decode", "bench e2e")


@pytest.mark.parametrize("command", SECTIONS)
def test_documented_options_are_those_of_the_command(command):
    documented, real = option_table(command), options_of(command)
    assert documented.keys() == real.keys()
    for option, default in real.items():
        said = documented[option]
        plain = str(default).removesuffix(".0")
        assert default in (None, False, True, "") or said in ("", plain), (
            f"{option} is {default!r} by default: {said!r}"
        )


def test_verify_has_the_options_of_decode_but_for_those_that_are_documented():
    verify, decode = options_of("bench verify"), options_of("bench decode")
    others = {name: default for name, default in verify.items() if decode.get(name, ...) != default}
    assert {name: str(default) for name, default in others.items()} | {"--ring-len": "16"} == option_table(
        "bench verify"
    )


def test_environment_variables_that_are_read_are_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    ours = r"REPLAYSSM_\w+|XDG_\w+"
    read = {
        name for path in (ROOT / "replayssm").rglob("*.py") for name in re.findall(rf'"({ours})"', path.read_text())
    }
    assert read == set(re.findall(rf"^\| `({ours})` \|", text, re.MULTILINE))


def test_documented_keys_are_those_of_the_json_objects():
    from replayssm.cli.doctor import Report
    from replayssm.cli.generate import GenerateResult

    text = (ROOT / "docs" / "cli.md").read_text()
    for name in [*GenerateResult.model_fields, *Report.model_fields]:
        assert f"`{name}`" in text, name


def test_the_readme_says_how_much_faster_the_engine_was():
    results = json.loads((ROOT / "benchmarks/results/nvidia-h200/e2e.json").read_text())
    speed = {(row["contender"], row["batch"]): row["tokens_per_s"] for row in results["rows"]}
    batches = sorted({batch for _, batch in speed})
    gains = [f"{speed['replay', batch] / speed['no-replay', batch]:.2f}" for batch in batches]
    over = [round(speed["replay", batch] / speed["transformers", batch]) for batch in batches]
    text = (ROOT / "README.md").read_text()
    assert f"decodes {gains[0]} (one row) to {gains[-1]} times ({batches[-1]} rows) as fast with replay" in text
    assert f"and {min(over)} to {max(over)} times as fast as transformers' `generate`" in text


def test_documented_model_types_are_the_supported_ones():
    from replayssm.loading.architectures import FAMILIES

    text = (ROOT / "README.md").read_text()
    for family, model_types in FAMILIES.items():
        assert model_types[0] in text, family
