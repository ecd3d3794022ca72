"""Fill a folder with the few files of other projects that `replayssm bench` can measure beside ours.

Nothing is installed, and nothing of theirs belongs in this repository: keep the folder out of your commits.

Usage: python -m benchmarks.rivals sglang [--into .rivals]
       python -m benchmarks.rivals vllm --checkout FOLDER [--into .rivals]
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from replayssm.bench.rivals import SGLANG, VLLM_FORK, Project


class FetchError(RuntimeError):
    """A file can't be had; the message is one line."""


def from_wheel(project: Project, into: Path) -> None:
    """Take the files from the project's published wheel, which pip downloads without its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        requirement = f"{project.name}=={project.version}"
        if subprocess.run((*pip, "--dest", folder, requirement), check=False).returncode:
            raise FetchError(f"pip could not download {requirement}")
        (wheel,) = Path(folder).glob("*.whl")
        take_from_wheel(project, wheel, into)


def take_from_wheel(project: Project, wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        lacking = sorted(set(project.files) - set(archive.namelist()))
        if lacking:
            raise FetchError(f"{wheel.name} has no {lacking[0]}")
        _write(project, into, archive.read, f"{wheel.name.split('-')[1]}")


def from_checkout(project: Project, checkout: Path, into: Path) -> None:
    """Take the files from a checkout of the project that is there already."""
    lacking = project.missing(checkout)
    if lacking:
        raise FetchError(f"{checkout} has no {lacking[0]}: a checkout of {project.version} is wanted")
    git = ("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    version = f"{project.version.split()[0]} {commit or 'of unknown commit'}"
    _write(project, into, lambda name: (checkout / name).read_bytes(), version)


def _write(project: Project, into: Path, read: Callable[[str], bytes], version: str) -> None:
    for name in project.files:
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(name))
    (into / project.name / "VERSION").write_text(version + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    into = argparse.ArgumentParser(add_help=False)
    into.add_argument("--into", type=Path, default=Path(".rivals"), help="folder to fill, default .rivals")
    projects = parser.add_subparsers(dest="project", required=True)
    projects.add_parser("sglang", parents=[into], help=f"SGLang {SGLANG.version}, from its wheel")
    vllm = projects.add_parser("vllm", parents=[into], help=f"{VLLM_FORK.version}, from a checkout")
    vllm.add_argument("--checkout", type=Path, required=True, help="folder of a clone")
    options = parser.parse_args(arguments)
    try:
        if options.project == "sglang":
            from_wheel(SGLANG, options.into)
        else:
            from_checkout(VLLM_FORK, options.checkout, options.into)
    except FetchError as error:
        print(f"benchmarks.rivals: {error}", file=sys.stderr)
        return 1
    print(f"{options.project} is in {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
