"""Other projects' kernels, loaded from a folder of the user's; none of them is part of this package.

The folder holds a few files of each project under the paths that they have in it. The projects need not be installed:
their packages are stood in for by empty ones, and the few things that the files import by small ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Project:
    """A project whose kernels can be measured beside ours.

    Args:
        name: what `benchmarks.rivals` and the results call it.
        package: what Python calls it.
        version: what the adapters were written for.
        files: what is needed of it, paths from the folder that holds the package. One that ends with a slash is a
            folder with all that is in it.
        how: how to get it, said where it is missing.
        stand_ins: small modules in place of those that the files import, by name; given the folder of the package.
        wheel: what pip calls it, or nothing where a checkout is wanted.
        within: that folder's place in the rivals' folder: two versions of one package have two.
    """

    name: str
    package: str
    version: str
    files: tuple[str, ...]
    how: str
    stand_ins: Callable[[Path], dict[str, dict[str, Any]]]
    wheel: str = ""
    within: str = ""

    def missing(self, folder: Path) -> list[str]:
        return [name for name in self.files if not (folder / self.within / name).exists()]

    def version_in(self, folder: Path) -> str:
        """What the fetch noted, or that it is unknown."""
        note = folder / self.within / self.package / "VERSION"
        return note.read_text().strip() if note.is_file() else "unknown version"


class RivalError(RuntimeError):
    """A rival's files are not there or can't be used."""


def load(project: Project, folder: Path, module: str) -> ModuleType:
    """Import a module of a project from the rivals' folder.

    Raises:
        RivalError: the project itself is imported already, or a module does not import.
    """
    try:
        _stand_in(project, folder / project.within)
        return import_module(module)
    except (ImportError, AttributeError, OSError) as error:
        raise RivalError(f"{project.name} does not import from {folder}: {error}") from error


#: Modules of a package's versions that are not the one in use, by the folder that they are from.
_SET_ASIDE: dict[Path, dict[str, ModuleType]] = {}


def _stand_in(project: Project, folder: Path) -> None:
    package = folder / project.package
    _switch_to(project, package)
    packages = {parent for name in project.files for parent in Path(name).parents if parent != Path()}
    contents = {".".join(path.parts): folder / path for path in packages}
    small = project.stand_ins(package)
    for name in small:
        parts = name.split(".")
        for end in range(1, len(parts)):
            contents.setdefault(".".join(parts[:end]), folder.joinpath(*parts[:end]))
    for name in sorted(contents):
        _install(name, str(contents[name]), small.get(name, {}))
    for name in small.keys() - contents.keys():
        _install(name, None, small[name])


def _switch_to(project: Project, package: Path) -> None:
    """Set the modules of another version of the package aside, and take back those of this one.

    A function that was imported goes on with the modules that it has.
    """
    there = sys.modules.get(project.package)
    if there is not None:
        current = getattr(there, "stands_in_for", None)
        if current is None:
            raise RivalError(f"{project.package} is imported already, from elsewhere")
        if current == package:
            return
        _SET_ASIDE[current] = _taken_out(project.package)
    sys.modules.update(_SET_ASIDE.pop(package, {}))


def _taken_out(package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in names}


def _install(name: str, path: str | None, values: dict[str, Any]) -> None:
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [path]
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    elif path is not None:
        vars(module)["stands_in_for"] = Path(path)
