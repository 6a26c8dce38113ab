"""Settings: every field documented, unknown keys and bad values refused in one sentence."""

import dataclasses
from pathlib import Path

import pytest

from dflash_cache.errors import UsageError
from dflash_cache.options import build, read_yaml
from dflash_train.config import TrainConfig

PATHS = {"cache": "c", "out": "o"}


def test_every_field_has_a_help_text():
    for field in dataclasses.fields(TrainConfig):
        assert field.metadata["help"], field.name


def test_unknown_key_names_file_key_and_near_match(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("cache: c\nout: o\nanchor: 3\n")
    with pytest.raises(UsageError, match=r"run\.yaml: unknown key 'anchor': did you mean anchors"):
        build(TrainConfig, read_yaml(path), source=str(path))


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("cache: c\nout: o\nlr: 6e-4\nsteps: 3\n")
    config = build(TrainConfig, read_yaml(path), source=str(path), overrides={"steps": 7})
    assert (config.lr, config.steps, config.cache) == (6e-4, 7, Path("c"))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("lr", 0, "lr is 0.0: give a number above 0"),
        ("warmup", 1.0, "warmup is 1.0: give at least 0 and less than 1"),
        ("steps", 2.5, "steps is 2.5: give a whole number"),
        ("resume", "yes", "resume is 'yes': give true or false"),
        ("verify", "maybe", "verify is 'maybe': give always or first or off"),
        ("anchors", 0, "anchors is 0: give 1 or more"),
        ("sliding_layers", 2, "without a window: give sliding_window"),
        ("device", "tpu", "device is 'tpu'"),
    ],
)
def test_a_bad_value_names_field_value_and_range(key: str, value: object, told: str):
    with pytest.raises(UsageError, match=told):
        build(TrainConfig, {**PATHS, key: value})


def test_a_missing_cache_is_asked_for():
    with pytest.raises(UsageError, match="cache is missing: give --cache"):
        build(TrainConfig, {"out": "o"})


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"run\.yaml"):
        build(TrainConfig, read_yaml(path), source=str(path))
