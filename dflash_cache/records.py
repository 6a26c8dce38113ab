"""Lines of a JSONL file -> records of one known shape, every error with file and line."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cache.errors import DataError, UsageError

SHAPES = (
    '{"text"}, {"messages": [{role, content}]}, {"conversations": [{from, value}]}, '
    '{"prompt", "response"}, {"input_ids", "loss_mask"}'
)
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
KNOWN_ROLES = ("system", "user", "assistant", "tool", "developer")
# Of these a record has one; the others of `SHAPES` stand beside it.
MAIN_KEYS = ("text", "messages", "conversations", "prompt", "input_ids")

Message = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One JSON object of the file. `where` is `file:line` for errors."""

    fields: dict[str, Any]
    line: int
    where: str

    def digest(self) -> str:
        """sha256 hex of the canonical JSON: sorted keys, no spaces, ASCII."""
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check_one_shape(self) -> None:
        """`DataError` if the record could be read in two ways; a null says nothing."""
        keys = [key for key in MAIN_KEYS if self.fields.get(key) is not None]
        if keys[:2] == ["messages", "prompt"]:  # a chat set's copy of its first turn
            keys = keys[:1]
        if len(keys) > 1:
            raise DataError(
                f'{self.where}: the record has both "{keys[0]}" and "{keys[1]}"; '
                "keep the one that is to be used"
            )

    def text(self, key: str) -> str:
        return _checked_text(self.fields[key], self.where, f'"{key}"')

    def messages(self, key: str) -> list[Message]:
        """The messages under `messages`, `conversations` or `prompt`, as role and content."""
        turns = self.fields[key]
        if not isinstance(turns, list) or not turns:
            raise DataError(f'{self.where}: "{key}" must be a list of messages with at least one')
        return [_message(turn, f"{self.where}: message {i + 1}") for i, turn in enumerate(turns)]

    def integers(self, key: str, end: int, *, booleans: bool = False) -> list[int]:
        """A list of integers in [0, end); with `booleans` true and false are 1 and 0."""
        values, kinds = self.fields[key], (int, bool) if booleans else (int,)
        if not isinstance(values, list) or any(type(v) not in kinds for v in values):
            raise DataError(f'{self.where}: "{key}" must be a list of integers')
        if bad := [v for v in values if not 0 <= v < end]:
            raise DataError(f'{self.where}: "{key}" holds {bad[0]}, which is not in [0, {end})')
        return [int(v) for v in values]


def _checked_text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {what} holds half of a surrogate pair, which is no text"
        ) from error
    return value


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where} must be an object, not {type(turn).__name__}")
    if "from" in turn and "value" in turn:
        turn = {**turn, "role": _role(turn["from"], where), "content": turn["value"]}
    if "role" not in turn or ("content" not in turn and "tool_calls" not in turn):
        raise DataError(f"{where} needs role and content (or from and value)")
    role = _checked_text(turn["role"], where, "the role")
    if role not in KNOWN_ROLES:
        raise DataError(f"{where} has the role {role!r}; known are {', '.join(KNOWN_ROLES)}")
    rest = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
    return {"role": role, "content": _content(turn.get("content"), where), **rest}


def _role(name: Any, where: str) -> str:
    if not isinstance(name, str) or name not in ROLES:
        raise DataError(f'{where} is "from" {name!r}; known are {", ".join(ROLES)}')
    return ROLES[name]


def _content(content: Any, where: str) -> str:
    """A message's text; parts of the form {"type": "text", "text"} are joined, None is empty."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        return "".join(_checked_text(p, where, "each part of the content") for p in parts)
    return _checked_text(content, where, "the content")


def read_records(path: Path, advance: Callable[[int], object] | None = None) -> Iterator[Record]:
    """The records of a JSONL file; blank lines are ignored, `advance` gets each line's bytes.

    Raises `UsageError` if the file cannot be opened, `DataError` naming file and line for text
    that is not UTF-8, broken JSON, a line that is no object, and a file without records.
    """
    if not path.is_file():
        what = "this is a folder" if path.is_dir() else "there is no such file"
        raise UsageError(f"{path}: {what}; give a JSONL file")
    found = False
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if advance:
                advance(len(raw))
            text = _decode(raw, f"{path}:{number}", first=number == 1)
            if text.strip():
                found = True
                yield Record(_parse(text, f"{path}:{number}"), number, f"{path}:{number}")
    if not found:
        raise DataError(f"{path}: the file holds no records; each line is to be one of {SHAPES}")


def _decode(raw: bytes, where: str, first: bool) -> str:
    try:
        # A byte order mark is harmless at the start of a file.
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8"
        ) from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: the line is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: the line is a {type(value).__name__}; expected one of {SHAPES}")
    return value
