"""Results that are kept, and the files of the documents that are made from them."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def bring_up_to_date(files: Iterable[tuple[Path, str]], *, check: bool, done: str) -> int:
    """Write the files that don't say what they should, and name them.

    Args:
        files: paths, and what they should say.
        check: change nothing.
        done: what is said to have been done with them.

    Returns:
        The exit code: 1 if a file is out of date and stays so.
    """
    stale = [(path, text) for path, text in files if not path.is_file() or path.read_text() != text]
    if not check:
        for path, text in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"{'out of date' if check else done}: {', '.join(path.name for path, _ in stale)}")
    return int(check and bool(stale))
