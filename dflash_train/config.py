# ruff: noqa: RUF009  (_option only builds a dataclasses.field)
"""What a training run can be told: one dataclass, documented field by field, read from YAML."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash_cache.errors import UsageError

# Fields with `binds=True` shape the curve: a resumed run must have the same ones.


def _option(default: Any, text: str, *, unit: str = "", binds: bool = False) -> Any:
    return field(default=default, metadata={"help": text, "unit": unit, "binds": binds})


def _required(text: str) -> Any:
    return field(metadata={"help": text, "unit": "path", "binds": False})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `dflash train`; each field's `metadata` holds `help`, `unit` and `binds`.

    Raises UsageError, naming the field, its value and the range, when a value is out of range.
    """

    cache: Path = _required("folder that `dflash extract` wrote")
    out: Path = _required("folder of the run: checkpoints, drafter, metrics")

    layers: int | None = _option(None, "drafter layers (default: 5)", binds=True)
    heads: int | None = _option(None, "query heads (default: 32, fewer for small D)", binds=True)
    kv_heads: int | None = _option(None, "key and value heads (default: 8)", binds=True)
    head_dim: int | None = _option(None, "size of a head (default: 128)", binds=True)
    intermediate: int | None = _option(
        None, "width of the MLP (default: the target's; MoE targets: 3 x hidden)", binds=True
    )
    sliding_layers: int = _option(
        0, "how many of the first layers have a sliding window", unit="layers", binds=True
    )
    sliding_window: int | None = _option(
        None, "window of the sliding layers", unit="tokens", binds=True
    )
    mask_token_id: int | None = _option(
        None, "id whose embedding marks a slot to fill (default: the first unused row)", binds=True
    )
    block_size: int = _option(16, "slots of a block, the anchor included", unit="slots", binds=True)
    init_from: Path | None = _option(
        None, "start from the weights of this drafter folder (z-lab layout)", unit="path"
    )

    anchors: int | None = _option(
        None, "blocks sampled in a row, each step anew (default: one per 8 tokens)", binds=True
    )
    batch_rows: int = _option(1, "rows of the cache in one forward", unit="rows", binds=True)
    accumulation: int = _option(1, "forwards summed into one optimizer step", binds=True)
    epochs: int = _option(6, "passes over the cache, unless `steps` is given", binds=True)
    steps: int | None = _option(
        None, "optimizer steps, instead of `epochs`", unit="steps", binds=True
    )

    lr: float = _option(6e-4, "peak learning rate of AdamW", binds=True)
    beta1: float = _option(0.9, "AdamW: decay of the mean of gradients", binds=True)
    beta2: float = _option(0.95, "AdamW: decay of the mean of squared gradients", binds=True)
    weight_decay: float = _option(0.0, "AdamW: decoupled weight decay", binds=True)
    warmup: float = _option(
        0.04, "share of the steps with a rising learning rate, before the cosine", binds=True
    )
    clip: float = _option(1.0, "largest global gradient norm", binds=True)
    gamma: float | None = _option(
        None,
        "decay of the loss weights over a block's slots (default: 7/5/4 for 16/10/8 slots)",
        binds=True,
    )
    seed: int = _option(0, "seed of weights, order of rows and anchors", binds=True)

    eval_every: int = _option(500, "steps between evaluations; 0: at the end only", unit="steps")
    heldout_rows_limit: int | None = _option(
        None, "held-out rows that an evaluation reads (default: all)", unit="rows"
    )
    checkpoint_every: int = _option(
        500, "steps between checkpoints; 0: at the end only", unit="steps"
    )
    keep_last: int = _option(2, "checkpoints kept, older ones are removed", unit="checkpoints")
    resume: bool = _option(False, "continue the run in `out` from its last checkpoint")
    log_every: int = _option(10, "steps between log lines", unit="steps")

    device: str = _option("auto", "cuda, cuda:N, cpu, or auto: CUDA if there is any")
    precision: str = _option(
        "auto", "bf16 or fp32 arithmetic, weights are fp32 masters (auto: bf16 on CUDA)", binds=True
    )
    verify: str = _option("first", "check a row's checksum when read: always, first or off")
    strict: bool = _option(
        False, "stop when a step after the warm-up recompiles, allocates or synchronises"
    )
    warmup_steps: int = _option(
        3, "steps before the promise of no compile and no allocation holds", unit="steps"
    )

    def __post_init__(self) -> None:
        for name, (accepts, range_text) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not accepts(value):
                raise UsageError(f"{name} is {value!r}: give {range_text}")
        if self.sliding_layers and self.sliding_window is None:
            raise UsageError(
                f"sliding_layers is {self.sliding_layers} without a window: give sliding_window"
            )

    @property
    def rows_per_step(self) -> int:
        return self.batch_rows * self.accumulation

    def drafter_overrides(self) -> dict[str, Any]:
        """Fields of `DrafterConfig` that this run sets itself."""
        shape = {
            "block_size": self.block_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "mask_token_id": self.mask_token_id,
        }
        return {key: value for key, value in shape.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; paths become strings."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}


def binding_fields() -> list[str]:
    """Names of the fields that a resumed run must repeat."""
    return [f.name for f in dataclasses.fields(TrainConfig) if f.metadata["binds"]]


def _at_least(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v >= low), f"{low} or more"


def _between(low: float, high: float, *, open_high: bool = False) -> Any:
    edge = "less than" if open_high else "at most"
    accepts = (lambda v: low <= v < high) if open_high else (lambda v: low <= v <= high)
    return accepts, f"at least {low} and {edge} {high}"


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v in choices), " or ".join(choices)


_above_zero = ((lambda v: v > 0), "a number above 0")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            *("layers", "heads", "kv_heads", "head_dim", "intermediate", "anchors", "batch_rows"),
            *("accumulation", "epochs", "steps", "keep_last", "log_every", "sliding_window"),
            *("heldout_rows_limit", "warmup_steps"),
        ),
        _at_least(1),
    ),
    **dict.fromkeys(
        ("sliding_layers", "mask_token_id", "weight_decay", "eval_every", "checkpoint_every"),
        _at_least(0),
    ),
    "seed": _between(0, 2**31 - 1),
    "block_size": _between(2, 128),
    "warmup": _between(0, 1, open_high=True),
    "beta1": _between(0, 1, open_high=True),
    "beta2": _between(0, 1, open_high=True),
    "lr": _above_zero,
    "clip": _above_zero,
    "gamma": _above_zero,
    "precision": _one_of("auto", "bf16", "fp32"),
    "verify": _one_of("always", "first", "off"),
    "device": ((lambda v: v.split(":")[0] in ("auto", "cpu", "cuda")), "auto, cpu, cuda or cuda:N"),
}


def load_config(path: Path, **overrides: Any) -> TrainConfig:
    """TrainConfig from a YAML mapping; `overrides` that are not None win over the file.

    Raises UsageError naming the file and the key for an unreadable file, an unknown key (with
    near matches), a value of the wrong type or out of its range.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected `key: value` lines, got {type(content).__name__}")
    return config_from_dict(content, source=str(path), **overrides)


def config_from_dict(
    content: dict[str, Any], *, source: str = "configuration", **overrides: Any
) -> TrainConfig:
    """As `load_config`, from a mapping that is read already."""
    _refuse_unknown(content, source)
    given = {**content, **{k: v for k, v in overrides.items() if v is not None}}
    _refuse_unknown(given, "arguments")
    for key in ("cache", "out"):
        if key not in given:
            raise UsageError(f"{source}: {key} is missing: give --{key} FOLDER")
    hints = typing.get_type_hints(TrainConfig)
    values = {key: _coerce(key, value, hints[key], source) for key, value in given.items()}
    try:
        return TrainConfig(**values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error


def _refuse_unknown(keys: Iterable[str], source: str) -> None:
    known = [f.name for f in dataclasses.fields(TrainConfig)]
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "`dflash train --help` lists it"
            )
            raise UsageError(f"{source}: unknown key {key!r}: {hint}")


def _coerce(key: str, value: Any, hint: Any, source: str) -> Any:
    """A value as the field's type; YAML 1.1 reads `6e-4` as a string, so numbers may be text."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(o for o in options if o is not type(None))
    if wanted is bool or isinstance(value, bool):
        fits = wanted is bool and isinstance(value, bool)
        converted = value
    else:
        fits, converted = _convert(value, wanted)
    if not fits:
        raise UsageError(f"{source}: {key} is {value!r}: give a value of type {wanted.__name__}")
    return converted


def _convert(value: Any, wanted: type) -> tuple[bool, Any]:
    if not isinstance(value, int | float | str | Path):
        return False, None
    try:
        converted = wanted(value)
    except (TypeError, ValueError):
        return False, None
    # int(2.7) would cut in silence, str(5) would hide a misplaced number
    exact = wanted is not int or isinstance(value, int) or str(converted) == str(value)
    return exact and (wanted is not str or isinstance(value, str)), converted
