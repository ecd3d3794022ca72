"""Fill a folder with the few files of other projects that `replayssm bench` can measure beside ours.

Nothing is installed, and nothing of theirs belongs in this repository: keep the folder out of your commits.

Usage: python -m benchmarks.rivals sglang|vllm|fla [--wheel FILE] [--into .rivals]
       python -m benchmarks.rivals vllm-fork|mamba --checkout FOLDER [--into .rivals]
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from replayssm.bench.rivals.loading import Project
from replayssm.bench.rivals.projects import PROJECTS

#: pip is asked for the kind of wheel that each project publishes for Linux, whatever runs this.
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35))


class FetchError(RuntimeError):
    """A file can't be had; the message is one line."""


def from_wheel(project: Project, into: Path) -> None:
    """Take the files from the project's published wheel, which pip downloads without its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        where = ("--python-version", "3.12", *(f"--platform={name}" for name in (*PLATFORMS, "any")))
        requirement = f"{project.wheel}=={project.version}"
        if subprocess.run((*pip, *where, "--dest", folder, requirement), check=False).returncode:
            raise FetchError(f"pip could not download {requirement}")
        (wheel,) = Path(folder).glob("*.whl")
        take_from_wheel(project, wheel, into)


def take_from_wheel(project: Project, wheel: Path, into: Path) -> None:
    if not wheel.is_file():
        raise FetchError(f"wheel is {str(wheel)!r}, which is not a file")
    if not zipfile.is_zipfile(wheel) or wheel.name.count("-") < 2:
        raise FetchError(f"wheel is {str(wheel)!r}: a whole file {project.wheel}-{project.version}-*.whl is wanted")
    with zipfile.ZipFile(wheel) as archive:
        names = _wanted(project, archive.namelist(), wheel.name)
        _write(project, into, names, archive.read, wheel.name.split("-")[1])


def from_checkout(project: Project, checkout: Path, into: Path) -> None:
    """Take the files from a checkout of the project that is there already."""
    if not checkout.is_dir():
        raise FetchError(f"checkout is {str(checkout)!r}, which is not a folder")
    there = (path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file())
    names = _wanted(project, there, f"{checkout}: a checkout of {project.version} is wanted, it")
    git = ("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    version = f"{project.version.split()[0]} {commit or 'of unknown commit'}"
    _write(project, into, names, lambda name: (checkout / name).read_bytes(), version)


def _wanted(project: Project, there: Iterable[str], where: str) -> list[str]:
    """The project's files among those that are there, folders with all that they hold."""
    there = list(there)
    names: list[str] = []
    for wanted in project.files:
        found = [name for name in there if name == wanted or (wanted.endswith("/") and name.startswith(wanted))]
        if not found:
            raise FetchError(f"{where} has no {wanted}")
        names += [name for name in found if not name.endswith("/")]
    return names


def _write(project: Project, into: Path, names: list[str], read: Callable[[str], bytes], version: str) -> None:
    for name in names:
        path = into / project.within / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(name))
    (into / project.within / project.package / "VERSION").write_text(version + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--into", type=Path, default=Path(".rivals"), help="folder to fill, default .rivals")
    projects = parser.add_subparsers(dest="project", required=True)
    for project in PROJECTS:
        about = f"{project.version}, from {'its wheel' if project.wheel else 'a checkout'}"
        command = projects.add_parser(project.name, parents=[common], help=about)
        if project.wheel:
            command.add_argument("--wheel", type=Path, help="a wheel that is there already; default: pip downloads it")
        else:
            command.add_argument("--checkout", type=Path, required=True, help="folder of a clone")
    options = parser.parse_args(arguments)
    (project,) = (project for project in PROJECTS if project.name == options.project)
    try:
        if not project.wheel:
            from_checkout(project, options.checkout, options.into)
        elif options.wheel:
            take_from_wheel(project, options.wheel, options.into)
        else:
            from_wheel(project, options.into)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"benchmarks.rivals: {error}", file=sys.stderr)
        return 1
    print(f"{options.project} is in {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
