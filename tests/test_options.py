"""Options: what a YAML file or a flag may say for each type, and what a refusal tells."""

# ruff: noqa: RUF009  (option only builds a dataclasses.field)

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_cache.errors import UsageError
from dflash_cache.extract_config import ExtractConfig
from dflash_cache.options import (
    above_zero,
    at_least,
    between,
    build,
    check_ranges,
    device_name,
    one_of,
    option,
    read_yaml,
    required,
)


@dataclass(frozen=True)
class Settings:
    """One field of every type that a command has."""

    source: Path = required("where")
    taps: tuple[int, ...] | None = option(None, "layers")
    rate: float = option(0.5, "rate")
    steps: int = option(7, "steps", unit="steps", binds=True)
    resume: bool = option(False, "go on")
    mode: str = option("always", "mode")
    extra: dict[str, Any] | None = option(None, "more")

    def __post_init__(self) -> None:
        check_ranges(self, {"rate": above_zero, "mode": one_of("always", "never")})


def made(**content: object) -> Settings:
    return build(Settings, {"source": "s", **content})


def from_yaml(folder: Path, text: str, **overrides: object) -> Settings:
    path = folder / "run.yaml"
    path.write_text("source: s\n" + text)
    return build(Settings, read_yaml(path), source=str(path), overrides=overrides)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("taps: [1, 3]", "taps", (1, 3)),
        ("taps: 1,3", "taps", (1, 3)),
        ("taps: ' 1, 3'", "taps", (1, 3)),
        ("taps: '5'", "taps", (5,)),
        ("taps: null", "taps", None),
        ("rate: 6e-4", "rate", 6e-4),
        ("rate: 2", "rate", 2.0),
        ("steps: '12'", "steps", 12),
        ("resume: true", "resume", True),
        ("extra: {enable_thinking: false}", "extra", {"enable_thinking": False}),
        ("""extra: '{"enable_thinking": false}'""", "extra", {"enable_thinking": False}),
    ],
)
def test_a_value_becomes_the_fields_type(tmp_path, text, field, value):
    found = getattr(from_yaml(tmp_path, text), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("steps", True, "a whole number"),
        ("steps", 2.5, "a whole number"),
        ("steps", "many", "a whole number"),
        ("steps", None, "a whole number"),
        ("steps", [3], "a whole number"),
        ("rate", False, "a number"),
        ("rate", "fast", "a number"),
        ("resume", 1, "true or false"),
        ("resume", "true", "true or false"),
        ("mode", 3, "text"),
        ("mode", True, "text"),
        ("source", 4, "a path"),
        ("taps", "1,x", "whole numbers separated by commas"),
        ("taps", "", "whole numbers separated by commas"),
        ("taps", [1, 2.5], "whole numbers separated by commas"),
        ("taps", [True], "whole numbers separated by commas"),
        ("taps", 3, "whole numbers separated by commas"),
        ("extra", "{broken", "a JSON object"),
        ("extra", "[1]", "a JSON object"),
        ("extra", [1], "a JSON object"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field, value, kind):
    with pytest.raises(UsageError) as caught:
        made(**{field: value})
    told = f"{field} is {value!r}: give {kind}"
    assert str(caught.value) == f"configuration: {told}"


def test_an_unknown_key_names_the_file_the_key_and_its_neighbours(tmp_path):
    with pytest.raises(UsageError) as caught:
        from_yaml(tmp_path, "step: 3")
    path = tmp_path / "run.yaml"
    assert str(caught.value) == f"{path}: unknown key 'step': did you mean steps?"


@pytest.mark.parametrize("key", ["zzzzz", 3])
def test_an_unknown_key_without_neighbours_points_to_the_help(key):
    with pytest.raises(UsageError, match=f"unknown key {key!r}: `--help` lists the keys"):
        build(Settings, {"source": "s", key: 1})


def test_a_required_key_that_nobody_gave_is_asked_for(tmp_path):
    with pytest.raises(UsageError, match=r"^run\.yaml: source is missing: give --source$"):
        build(Settings, {"steps": 3}, source="run.yaml", overrides={"source": None})
    assert build(Settings, {}, overrides={"source": "s"}).source == Path("s")


def test_what_was_given_on_the_command_line_wins(tmp_path):
    settings = from_yaml(tmp_path, "steps: 3\nrate: 2\n", steps=9, rate=None)
    assert (settings.steps, settings.rate, settings.mode) == (9, 2.0, "always")


@pytest.mark.parametrize(
    ("accepts", "good", "bad", "words"),
    [
        (at_least(2), [2, 3], [1.9, -1], "2 or more"),
        (between(0, 1), [0, 0.5, 1], [-0.1, 1.1], "at least 0 and at most 1"),
        (between(0, 1, open_high=True), [0, 0.99], [1, 2], "at least 0 and less than 1"),
        (above_zero, [1e-9, 3], [0, -1, float("nan")], "a number above 0"),
        (at_least(0), [0], [float("nan")], "0 or more"),
        (one_of("a", "b"), ["a", "b"], ["c", ""], "a or b"),
        (device_name, ["auto", "cpu", "cuda:3"], ["tpu", "", "cuda0"], "auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_range_accepts_what_its_words_say(accepts, good, bad, words):
    holds, told = accepts
    assert told == words
    assert [value for value in good if not holds(value)] == []
    assert [value for value in bad if holds(value)] == []


def test_a_value_out_of_range_names_source_field_value_and_range(tmp_path):
    path = tmp_path / "run.yaml"
    with pytest.raises(UsageError) as caught:
        from_yaml(tmp_path, "rate: -1")
    assert str(caught.value) == f"{path}: rate is -1.0: give a number above 0"


def test_none_is_in_every_range():
    check_ranges(made(), {"taps": at_least(2)})
    with pytest.raises(UsageError, match="steps is 7: give 8 or more"):
        check_ranges(made(), {"taps": at_least(2), "steps": at_least(8)})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n", "expected `key: value` lines, got a list"),
        ("a: [", r"run\.yaml: line 1, (?!.*unicode string)"),
        ("", "there are no keys in it"),
        ("# only this\n", "there are no keys in it"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, text, told):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        read_yaml(path)
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError) as caught:
        read_yaml(tmp_path / "none.yaml")
    told = f"cannot read the configuration {tmp_path / 'none.yaml'}: no such file or directory"
    assert str(caught.value) == told


GIVEN = {"model": "m", "data": "d", "out": "o"}


def test_an_extraction_reads_its_flags_as_the_yaml_would():
    flags = {"taps": "1,3", "template_options": '{"enable_thinking": false}', "heldout": "0"}
    listed = {"taps": [1, 3], "template_options": {"enable_thinking": False}, "heldout": 0.0}
    config = build(ExtractConfig, GIVEN, overrides=flags)
    assert config == build(ExtractConfig, {**GIVEN, **listed})
    assert (config.taps, config.data) == ((1, 3), Path("d"))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("seq_len", 1, "seq_len is 1: give 2 or more"),
        ("heldout", 1, "heldout is 1.0: give at least 0 and less than 1"),
        ("rows_per_shard", 0, "rows_per_shard is 0: give 1 or more"),
        ("world", 0, "world is 0: give 1 or more"),
        ("rank", -1, "rank is -1: give 0 or more"),
    ],
)
def test_an_extraction_refuses_what_is_out_of_range(field, value, told):
    with pytest.raises(UsageError, match=told):
        build(ExtractConfig, {**GIVEN, field: value})


def test_a_value_from_the_command_line_is_not_blamed_on_the_file():
    with pytest.raises(UsageError, match=r"^command line: heldout is 2\.0"):
        build(ExtractConfig, dict(GIVEN), source="a.yaml", overrides={"heldout": 2.0})
    with pytest.raises(UsageError, match=r"^command line: taps is '0,foo'"):
        build(ExtractConfig, dict(GIVEN), source="a.yaml", overrides={"taps": "0,foo"})
    with pytest.raises(UsageError, match=r"^a\.yaml: heldout is 2\.0"):
        build(ExtractConfig, {**GIVEN, "heldout": 2.0}, source="a.yaml", overrides={"seq_len": 64})
