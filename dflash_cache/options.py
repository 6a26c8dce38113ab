"""Settings of a command: a frozen dataclass, documented by field, filled from YAML or flags.

Every field is made by `option` or `required`, so that its `metadata` says what `--help` shows.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dflash_cache.errors import UsageError

Config = TypeVar("Config")
COMMAND_LINE = "command line"
Range = tuple[Callable[[Any], bool], str]  # does it accept the value, and what it accepts in words


# What a person is to give for a field of this type.
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    tuple: "whole numbers separated by commas",
    dict: "a JSON object",
}


def option(default: Any, text: str, *, unit: str = "", binds: bool = False) -> Any:
    """A field with a default; `binds` marks what a resumed run may not change."""
    return dataclasses.field(default=default, metadata={"help": text, "unit": unit, "binds": binds})


def required(text: str, *, unit: str = "path") -> Any:
    """A field that must be given."""
    return dataclasses.field(metadata={"help": text, "unit": unit, "binds": False})


def at_least(low: float) -> Range:
    return (lambda v: v >= low), f"{low} or more"


def between(low: float, high: float, *, open_high: bool = False) -> Range:
    edge = "less than" if open_high else "at most"
    accepts = (lambda v: low <= v < high) if open_high else (lambda v: low <= v <= high)
    return accepts, f"at least {low} and {edge} {high}"


def one_of(*choices: str) -> Range:
    return (lambda v: v in choices), " or ".join(choices)


above_zero: Range = ((lambda v: v > 0), "a number above 0")
device_name: Range = (
    (lambda v: v.split(":")[0] in ("auto", "cpu", "cuda")),
    "auto, cpu, cuda or cuda:N",
)


def check_ranges(config: Any, ranges: dict[str, Range]) -> None:
    """UsageError for the first field whose value is not None and out of its range."""
    for name, (accepts, words) in ranges.items():
        value = getattr(config, name)
        if value is not None and not accepts(value):
            raise UsageError(f"{name} is {value!r}: give {words}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of `key: value` lines; UsageError if it is none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the configuration {path}: {_why(error)}") from error
    if content is None:
        raise UsageError(f"{path}: there are no keys in it; write `key: value` lines")
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else repr(content)
        raise UsageError(f"{path}: expected `key: value` lines, got {kind}")
    return content


def _why(error: Exception) -> str:
    """The reason in one line; the path is told beside it."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, " if mark else ""
    told = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is no YAML"
    return f"{place}{told}"


def build(
    config: type[Config],
    content: dict[str, Any],
    *,
    source: str = "configuration",
    overrides: dict[str, Any] | None = None,
) -> Config:
    """`config` filled from `content`; those of `overrides` that are not None win.

    Raises UsageError naming the source and the key for an unknown key (with near matches), a value
    of the wrong type or out of range, and a required key that nobody gave.
    """
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    _refuse_unknown(content, fields, source)
    given = {**content, **{k: v for k, v in (overrides or {}).items() if v is not None}}
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in given:
            raise UsageError(f"{source}: {name} is missing: give --{name.replace('_', '-')}")
    hints = typing.get_type_hints(config)
    told = {key for key, value in (overrides or {}).items() if value is not None}
    values = {
        key: _coerce(key, value, hints[key], COMMAND_LINE if key in told else source)
        for key, value in given.items()
    }
    try:
        return config(**values)
    except UsageError as error:
        where = COMMAND_LINE if str(error).split(" ")[0] in told else source
        raise UsageError(f"{where}: {error}") from error


def _refuse_unknown(keys: Iterable[str], known: Iterable[str], source: str) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`--help` lists the keys"
            raise UsageError(f"{source}: unknown key {key!r}: {hint}")


def _coerce(key: str, value: Any, hint: Any, source: str) -> Any:
    """A value as the field's type; YAML 1.1 reads `6e-4` as a string, so numbers may be text."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    wanted = next(kind for kind in kinds if kind is not type(None))
    origin = typing.get_origin(wanted)
    if origin is not None:
        fits, converted = _sequence(value) if origin is tuple else _mapping(value)
        wanted = origin
    elif wanted is bool or isinstance(value, bool):
        fits, converted = wanted is bool and isinstance(value, bool), value
    else:
        fits, converted = _convert(value, wanted)
    if not fits:
        raise UsageError(f"{source}: {key} is {value!r}: give {WORDS[wanted]}")
    return converted


def _sequence(value: Any) -> tuple[bool, Any]:
    """A list of whole numbers, or "1,8,15"."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return False, None
    pairs = [_convert(item.strip() if isinstance(item, str) else item, int) for item in items]
    return all(fits for fits, _ in pairs), tuple(number for _, number in pairs)


def _mapping(value: Any) -> tuple[bool, Any]:
    """A mapping, or one written as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False, None
    return isinstance(value, dict), value


def _convert(value: Any, wanted: type) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Path):
        return False, None
    try:
        converted = wanted(value)
    except (TypeError, ValueError):
        return False, None
    # int(2.7) would cut in silence, str(5) would hide a misplaced number
    exact = wanted is not int or isinstance(value, int) or str(converted) == str(value)
    return exact and (wanted is not str or isinstance(value, str)), converted
