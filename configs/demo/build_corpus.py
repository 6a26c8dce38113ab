"""Gather the demo target's corpus: permissively licensed Python source and documentation.

Sources: the CPython standard library of the running interpreter (and of other CPython folders),
CPython's documentation, and named installed packages whose metadata names a permissive licence.
Files are cut into pieces of about a thousand tokens at top-level boundaries. Functions with a
docstring also become short chats (request: signature and first paragraph; answer: the source).

Writes OUT/train.jsonl and OUT/heldout.jsonl with {"text": ...} or {"messages": [...]} lines, and
OUT/corpus.json with counts and licences. A file belongs to one split, by the hash of its path
without the Python version, so the same module of two CPython versions never crosses the split.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.I)
RESTRICTED = re.compile(r"GPL|MPL|Mozilla|CC-BY-NC|Proprietary|Commercial", re.I)
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "_vendor", "third_party", "pydoc_data"}


class Source(NamedTuple):
    """One file of the corpus: where it came from, its split key and its text."""

    group: str
    key: str
    text: str


def digest(text: str) -> int:
    """The first 8 bytes of SHA-256 as an integer: a stable hash across runs and machines."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def readable(path: Path) -> str | None:
    """The file's text, or None for what teaches nothing: other encodings, tables, blobs."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    if len(text) < 200 or max(map(len, text.splitlines()), default=0) > 500:
        return None
    letters = sum(map(str.isalpha, text))
    plain = sum(map(str.isascii, text))
    if letters < 0.4 * len(text.replace(" ", "")) or plain < 0.97 * len(text):
        return None
    return text.replace("\r\n", "\n").expandtabs(4)


def walk(root: Path, suffixes: tuple[str, ...], group: str, prefix: str) -> Iterator[Source]:
    """Every readable file under root with one of the suffixes, in a stable order."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if not path.name.endswith(suffixes) or SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        text = readable(path)
        if text is not None:
            yield Source(group, f"{prefix}/{relative.as_posix()}", text)


def licence_of(name: str, site_packages: Path | None) -> str:
    """The licence that the package's metadata names; empty if it names none."""
    path = [str(site_packages)] if site_packages else sys.path
    found = list(importlib.metadata.distributions(name=name, path=path))
    if not found:
        raise SystemExit(f"build_corpus: package {name!r} is not installed; leave it out")
    meta = found[0].metadata
    expression, text = (meta.get_all(n) or [] for n in ("License-Expression", "License"))
    classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    stated = " ".join(expression) or " ".join(classifiers) or " ".join(text)
    return stated.splitlines()[0] if stated else ""


def package_files(name: str, site_packages: Path | None) -> tuple[str, list[Source]]:
    """A package's Python files, if its licence is permissive; otherwise stop with one sentence."""
    licence = licence_of(name, site_packages)
    if not PERMISSIVE.search(licence) or RESTRICTED.search(licence):
        raise SystemExit(f"build_corpus: {name} has licence {licence!r}, which is not on the list")
    root = (site_packages or Path(sysconfig.get_paths()["purelib"])) / name
    return licence, list(walk(root, (".py",), name, name))


def cap(sources: list[Source], limit: float) -> list[Source]:
    """A random part of the files (by hash of the path) that holds at most `limit` characters."""
    kept, total = [], 0
    for source in sorted(sources, key=lambda s: digest("cap:" + s.key)):
        if total + len(source.text) <= limit:
            kept.append(source)
            total += len(source.text)
    return kept


def cap_tests(sources: list[Source], share: float) -> list[Source]:
    """Keep test files to `share` of a source's characters."""
    is_test = [bool(re.search(r"/(test|tests|idle_test)/", s.key)) for s in sources]
    tests = [s for s, test in zip(sources, is_test, strict=True) if test]
    others = [s for s, test in zip(sources, is_test, strict=True) if not test]
    return others + cap(tests, sum(len(s.text) for s in others) * share / (1 - share))


def pieces(text: str, limit: int) -> Iterator[str]:
    """Cut a file after blank lines before top-level lines, into pieces of about `limit` chars."""
    current: list[str] = []
    size, blank = 0, False
    for line in text.splitlines(keepends=True):
        top_level = bool(line.strip()) and not line[0].isspace() and line[0] not in ")]}\"'"
        if current and ((blank and top_level and size > limit // 4) or size > limit):
            yield "".join(current).strip("\n") + "\n"
            current, size = [], 0
        current.append(line)
        size += len(line)
        blank = not line.strip()
    if size > 100:
        yield "".join(current).strip("\n") + "\n"


def request_of(node: ast.FunctionDef) -> str | None:
    """The user's message for a function: its signature and the docstring's first paragraph."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return None
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    if not 15 <= len(paragraph) <= 300:
        return None
    return f"Write `{node.name}({ast.unparse(node.args)})`: {paragraph}"


def chats(source: Source, max_lines: int) -> Iterator[dict]:
    """Chats from the documented functions of one file, methods included."""
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError):
        return
    lines = source.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        last = node.end_lineno or node.lineno
        request = request_of(node)
        if request is None or len(request) > 400 or last - node.lineno >= max_lines:
            continue
        answer = textwrap.dedent("\n".join(lines[node.lineno - 1 : last]))
        yield {
            "messages": [
                {"role": "user", "content": request},
                {"role": "assistant", "content": answer},
            ]
        }


def gather(args: argparse.Namespace) -> tuple[list[Source], dict[str, str]]:
    """All source files, deduplicated by content, and the licence of every group."""
    sources: list[Source] = []
    licences = {"cpython": "PSF-2.0"}
    for root in [Path(sysconfig.get_paths()["stdlib"]), *args.extra]:
        sources += cap_tests(list(walk(root, (".py",), "cpython", "cpython")), args.test_share)
    for root in args.docs:
        licences["cpython-docs"] = "PSF-2.0 (examples also 0BSD)"
        sources += walk(root, (".rst", ".txt"), "cpython-docs", "cpython-docs")
    for name in args.packages:
        licences[name], files = package_files(name, args.site_packages)
        sources += cap(cap_tests(files, args.test_share), args.package_megabytes * 1e6)
    unique = {digest(source.text): source for source in sources}
    return list(unique.values()), licences


def records_of(source: Source, args: argparse.Namespace) -> Iterator[dict]:
    """The text pieces of a file, then its chats."""
    for piece in pieces(source.text, args.piece):
        yield {"text": piece}
    if source.group != "cpython-docs":
        yield from chats(source, args.max_lines)


def text_of(record: dict) -> str:
    """All characters of a record, for hashing and counting."""
    return record.get("text") or "\n".join(m["content"] for m in record["messages"])


def split_records(sources: list[Source], args: argparse.Namespace) -> tuple[list, list]:
    """(train, held-out) records, each record's text once in the whole corpus."""
    seen: set[int] = set()
    train: list[dict] = []
    heldout: list[dict] = []
    for source in sources:
        held = digest("split:" + source.key) / 2**64 < args.heldout
        for record in records_of(source, args):
            mark = digest(
                record["messages"][1]["content"] if "messages" in record else text_of(record)
            )
            if mark not in seen:
                seen.add(mark)
                (heldout if held else train).append(record)
    return train, drop_known(train, heldout, args.max_overlap)


def code_lines(record: dict) -> list[str]:
    """The record's lines that are long enough to be worth recognising."""
    return [line.strip() for line in text_of(record).splitlines() if len(line.strip()) > 20]


def drop_known(train: list[dict], heldout: list[dict], limit: float) -> list[dict]:
    """Drop held-out records of which more than `limit` of the lines occur in training.

    Libraries copy code between files; such records would flatter the held-out loss.
    """
    known = {hash(line) for record in train for line in code_lines(record)}
    kept = []
    for record in heldout:
        lines = code_lines(record)
        if lines and sum(hash(line) in known for line in lines) <= limit * len(lines):
            kept.append(record)
    return kept


def limit_chats(records: list[dict], share: float, seed: int) -> list[dict]:
    """Shuffle, with chats limited to `share` of the characters."""
    texts = [r for r in records if "text" in r]
    chat = [r for r in records if "messages" in r]
    order = random.Random(seed)
    order.shuffle(chat)
    budget = sum(len(text_of(r)) for r in texts) * share / (1 - share)
    kept = []
    for record in chat:
        budget -= len(text_of(record))
        if budget < 0:
            break
        kept.append(record)
    mixed = texts + kept
    order.shuffle(mixed)
    return mixed


def write(path: Path, records: list[dict]) -> dict:
    """Write a JSONL file; returns its counts."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return {
        "records": len(records),
        "chats": sum("messages" in r for r in records),
        "characters": sum(len(text_of(r)) for r in records),
        "chat_characters": sum(len(text_of(r)) for r in records if "messages" in r),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=kind
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    add("--extra", type=Path, nargs="*", default=[], help="other CPython library folders")
    add("--docs", type=Path, nargs="*", default=[], help="folders of CPython's .rst documentation")
    add("--packages", nargs="*", default=[], help="installed packages of permissive licence")
    add("--site-packages", type=Path, help="where those packages are (default: this Python's)")
    add("--package-megabytes", type=float, default=6.0, help="at most this much of a package")
    add("--test-share", type=float, default=0.25, help="tests' share of a library's characters")
    add("--chat-share", type=float, default=0.18, help="chats' share of the characters")
    add("--heldout", type=float, default=0.015, help="share of files held out")
    add("--max-overlap", type=float, default=0.5, help="held-out records may share these lines")
    add("--piece", type=int, default=4000, help="characters in a text piece, about")
    add("--max-lines", type=int, default=60, help="longest function made into a chat")
    add("--seed", type=int, default=0, help="order of the records")
    return parser.parse_args()


def main() -> None:
    """Gather, split, write."""
    sources, licences = gather(args := parse_args())
    train, heldout = split_records(sources, args)
    args.out.mkdir(parents=True, exist_ok=True)
    summary = {
        "licences": licences,
        "train": write(args.out / "train.jsonl", limit_chats(train, args.chat_share, args.seed)),
        "heldout": write(
            args.out / "heldout.jsonl", limit_chats(heldout, args.chat_share, args.seed)
        ),
    }
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.group] += len(source.text)
    summary["characters_by_source"] = dict(sizes)
    (args.out / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
