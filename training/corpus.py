"""Build the byte corpus of the bundled models from a CPython source tree.

    python -m training.corpus --cpython path/to/Python-3.13.5 --out .data/corpus.npz

The text is Doc/**/*.rst and Lib/**/*.py (tests thinned, generated tables left out), one document per file, each closed
by <|endoftext|>, plus short question-and-answer dialogues in the chat template, made from docstrings and from the
reference pages. Token ids are byte values; ids from 256 on are the special tokens of `tokenizer.py`. Files are held out
by the hash of their path, so the split depends on nothing else; dialogues go where their source file goes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from training.tokenizer import END_OF_TEXT, IM_END, IM_START

HELD_OUT_OF = 40  # one file in this many is held out
TESTS_KEPT_OF = 3  # one test file in this many is kept
ROLE = re.compile(r":[a-zA-Z:+.-]+:`[!~]?([^`<]*?)(?:\s*<[^`]*>)?`")
SIGNATURE = re.compile(r"^\.\. (?:function|method|class|classmethod|staticmethod|decorator|exception)::\s+(\S.*)$")
QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "How do I use {name}?",
    "Tell me about {name}.",
    "what does {name} do",
)


def bucket(text: str, buckets: int) -> int:
    """A number below `buckets` that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % buckets


def source_files(root: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of every file that is used, in sorted order."""
    paths = sorted([*root.glob("Doc/**/*.rst"), *root.glob("Lib/**/*.py")])
    for path in paths:
        name = path.relative_to(root).as_posix()
        if name.startswith(("Lib/pydoc_data/", "Lib/test/cjkencodings", "Lib/idlelib/idle_test/")):
            continue  # a copy of the documentation; data
        if "/test/" in name and bucket(f"thin {name}", TESTS_KEPT_OF):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # tests of other encodings
        if "decoding_table" in text or len(text) < 200:
            continue  # generated character maps; stubs
        yield name, text


def plain(text: str) -> str:
    """reStructuredText of one paragraph as plain text on one line."""
    text = ROLE.sub(lambda match: match.group(1), text)
    text = text.replace("``", "`").replace("\\ ", "")
    return " ".join(text.split())


def documented(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, signature, first paragraph) of every object described on a reference page."""
    module = re.search(r"^\.\. (?:module|currentmodule):: (\S+)", text, re.MULTILINE)
    prefix = f"{module.group(1)}." if module else ""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        match = SIGNATURE.match(line)
        if not match:
            continue
        signature = match.group(1).strip()
        paragraph: list[str] = []
        for body in lines[index + 1 :]:
            stripped = body.strip()
            if not stripped and paragraph:
                break
            if stripped and not body.startswith(" "):
                break
            if stripped.startswith((".. ", ":")) or (stripped and not paragraph and body.startswith(" " * 12)):
                if paragraph:
                    break
                continue
            if stripped:
                paragraph.append(stripped)
        answer = plain(" ".join(paragraph))
        name = re.split(r"[(\s]", signature)[0]
        if 40 <= len(answer) <= 700 and answer[0].isupper() and answer[-1] in ".!" and "::" not in answer:
            full = name if name.startswith(prefix) or "." in name else prefix + name
            yield full, signature, answer


def docstrings(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(name, signature, first paragraph) of every public documented function and class of a module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    module = name.removeprefix("Lib/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    scopes: list[tuple[str, ast.AST]] = [(module, tree)]
    while scopes:
        prefix, scope = scopes.pop()
        for node in getattr(scope, "body", []):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            full = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                scopes.append((full, node))
            doc = ast.get_docstring(node)
            if not doc:
                continue
            answer = " ".join(doc.split("\n\n")[0].split())
            signature = node.name if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
            if 40 <= len(answer) <= 500 and answer[-1] in ".!":
                yield full, signature, answer


def dialogues(name: str, text: str) -> Iterator[list[tuple[str, str]]]:
    """Conversations, each a list of (role, content), about what one file documents."""
    found = documented(text) if name.endswith(".rst") else docstrings(name, text)
    for full, signature, answer in found:
        pick = bucket(full + answer, 1 << 16)
        question = QUESTIONS[pick % len(QUESTIONS)].format(name=full if pick % 3 else f"`{full}`")
        turns = [("user", question), ("assistant", answer)]
        if pick % 4 == 0:
            turns += [("user", "How is it called?"), ("assistant", f"```python\n{signature}\n```")]
        if pick % 7 == 0:
            turns.insert(0, ("system", "You are a helpful assistant for Python programmers."))
        yield turns


def encode_dialogue(turns: list[tuple[str, str]]) -> list[int]:
    """Token ids of a conversation, exactly as the chat template of `tokenizer.py` lays it out."""
    ids: list[int] = []
    for role, content in turns:
        ids += [IM_START, *f"{role}\n{content}".encode(), IM_END, *b"\n"]
    return [*ids, END_OF_TEXT]


def build(root: Path) -> dict[str, np.ndarray]:
    """Token streams {"train", "held_out"} (uint16) of a CPython source tree."""
    streams: dict[str, list[np.ndarray]] = {"train": [], "held_out": []}
    for name, text in source_files(root):
        split = "held_out" if bucket(name, HELD_OUT_OF) == 0 else "train"
        streams[split].append(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16))
        streams[split].append(np.array([END_OF_TEXT], dtype=np.uint16))
        talk = [token for turns in dialogues(name, text) for token in encode_dialogue(turns)]
        streams[split].append(np.array(talk, dtype=np.uint16))
    return {split: np.concatenate(parts) for split, parts in streams.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpython", type=Path, required=True, help="root of a CPython source tree")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    arguments = parser.parse_args()
    if not (arguments.cpython / "Lib").is_dir() or not (arguments.cpython / "Doc").is_dir():
        parser.error(f"--cpython {arguments.cpython} is no CPython source tree: it needs the folders Lib and Doc")
    streams = build(arguments.cpython)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **streams)
    for split, tokens in streams.items():
        special = int((tokens == IM_START).sum())
        print(f"{split}: {len(tokens):,} tokens, {special:,} dialogue turns")


if __name__ == "__main__":
    main()
