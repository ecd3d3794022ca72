"""Find the commits whose package has the source digest of a result.

Usage: python -m benchmarks.source [DIGEST ...]

Without a digest it prints that of the files on disk.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import ROOT
from replayssm.bench.source import SUFFIXES, digest, package_digest

PACKAGE = "replayssm"


def commits(repository: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Short name and source digest of each commit, newest first."""
    for commit in _git(repository, "log", "--format=%h").split():
        yield commit, of_commit(commit, repository)


def of_commit(commit: str, repository: Path = ROOT) -> str:
    blobs = {}
    for line in _git(repository, "ls-tree", "-r", "-z", f"{commit}:{PACKAGE}").split("\0"):
        about, _, path = line.partition("\t")
        if path.endswith(SUFFIXES):
            blobs[path] = about.split()[2]
    return digest(blobs)


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True).stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("digests", nargs="*", metavar="DIGEST")
    wanted = set(parser.parse_args(arguments).digests)
    if not wanted:
        print(package_digest(ROOT / PACKAGE))
        return 0
    found = [(commit, source) for commit, source in commits() if source in wanted]
    for commit, source in found:
        print(f"{source} is commit {commit}")
    for source in sorted(wanted - {source for _, source in found}):
        print(f"{source} is no commit of this repository", file=sys.stderr)
    return int(len(wanted) > len({source for _, source in found}))


if __name__ == "__main__":
    sys.exit(main())
