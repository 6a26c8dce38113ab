# ruff: noqa: RUF009  (option only builds a dataclasses.field)
"""What a training run can be told: one dataclass, documented field by field, read from YAML."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_cache.errors import UsageError
from dflash_cache.options import (
    Range,
    above_zero,
    at_least,
    between,
    check_ranges,
    device_name,
    one_of,
    option,
    required,
)

# Fields with `binds=True` shape the curve: a resumed run must have the same ones.


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `dflash train`; each field's `metadata` holds `help`, `unit` and `binds`.

    Raises UsageError, naming the field, its value and the range, when a value is out of range.
    """

    cache: Path = required("folder that `dflash extract` wrote")
    out: Path = required("folder of the run: checkpoints, drafter, metrics")

    layers: int | None = option(None, "drafter layers (default: 5)", binds=True)
    heads: int | None = option(None, "query heads (default: 32, fewer for small D)", binds=True)
    kv_heads: int | None = option(None, "key and value heads (default: 8)", binds=True)
    head_dim: int | None = option(None, "size of a head (default: 128)", binds=True)
    intermediate: int | None = option(
        None, "width of the MLP (default: the target's; MoE targets: 3 x hidden)", binds=True
    )
    sliding_layers: int = option(
        0, "how many of the first layers have a sliding window", unit="layers", binds=True
    )
    sliding_window: int | None = option(
        None, "window of the sliding layers", unit="tokens", binds=True
    )
    mask_token_id: int | None = option(
        None, "id whose embedding marks a slot to fill (default: the first unused row)", binds=True
    )
    block_size: int = option(16, "slots of a block, the anchor included", unit="slots", binds=True)
    init_from: Path | None = option(
        None, "start from the weights of this drafter folder (z-lab layout)", unit="path"
    )

    anchors: int | None = option(
        None, "blocks sampled in a row, each step anew (default: one per 8 tokens)", binds=True
    )
    batch_rows: int = option(1, "rows of the cache in one forward", unit="rows", binds=True)
    accumulation: int = option(
        1,
        "forwards summed into one optimizer step, over all ranks: N ranks under torchrun do 1/N of "
        "them each, so that a step has batch_rows x accumulation rows on any number of ranks",
        binds=True,
    )
    epochs: int = option(6, "passes over the cache, unless `steps` is given", binds=True)
    steps: int | None = option(
        None, "optimizer steps, instead of `epochs`", unit="steps", binds=True
    )

    lr: float = option(6e-4, "peak learning rate of AdamW", binds=True)
    beta1: float = option(0.9, "AdamW: decay of the mean of gradients", binds=True)
    beta2: float = option(0.95, "AdamW: decay of the mean of squared gradients", binds=True)
    weight_decay: float = option(0.0, "AdamW: decoupled weight decay", binds=True)
    warmup: float = option(
        0.04, "share of the steps with a rising learning rate, before the cosine", binds=True
    )
    clip: float = option(1.0, "largest global gradient norm", binds=True)
    loss: str = option(
        "decay",
        "weights of a block's slots: decay (fixed, see gamma) or dpace (by what the drafter's own "
        "probabilities say of the accepted length)",
        binds=True,
    )
    gamma: float | None = option(
        None,
        "decay of the weights over a block's slots (default: 7/5/4 for 16/10/8 slots)",
        binds=True,
    )
    seed: int = option(0, "seed of weights, order of rows and anchors", binds=True)

    eval_every: int = option(500, "steps between evaluations; 0: at the end only", unit="steps")
    heldout_rows_limit: int | None = option(
        None, "held-out rows that an evaluation reads (default: all)", unit="rows"
    )
    checkpoint_every: int = option(
        500,
        "steps between checkpoints, besides one after the warm-up; 0: at the end only",
        unit="steps",
    )
    keep_last: int = option(2, "checkpoints kept, older ones are removed", unit="checkpoints")
    keep_best: bool = option(
        True,
        "keep the checkpoint with the best held-out tau (walk) as well, saved when an evaluation "
        "finds it, and write its drafter to OUT/drafter; else that of the last step",
    )
    resume: bool = option(False, "continue the run in `out` from its last checkpoint")
    log_every: int = option(10, "steps between log lines", unit="steps")

    device: str = option("auto", "cuda, cuda:N, cpu, or auto: CUDA if there is any")
    precision: str = option(
        "auto", "bf16 or fp32 arithmetic, weights are fp32 masters (auto: bf16 on CUDA)", binds=True
    )
    verify: str = option("first", "check a row's checksum when read: always, first or off")
    io: str = option(
        "buffered",
        "how train rows are read: buffered, or direct, past the page cache (a cache larger than "
        "memory)",
    )
    strict: bool = option(
        False, "stop when a step after the warm-up recompiles, allocates or synchronises"
    )
    warmup_steps: int = option(
        3, "steps before the promise of no compile and no allocation holds", unit="steps"
    )

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.sliding_layers and self.sliding_window is None:
            raise UsageError(
                f"sliding_layers is {self.sliding_layers} without a window: give sliding_window"
            )
        if self.loss == "dpace" and self.gamma is not None:
            raise UsageError(f"loss dpace has no gamma (here {self.gamma}): leave one of them out")

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
    return [f.name for f in fields(TrainConfig) if f.metadata["binds"]]


_RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            *("layers", "heads", "kv_heads", "head_dim", "intermediate", "anchors", "batch_rows"),
            *("accumulation", "epochs", "steps", "keep_last", "log_every", "sliding_window"),
            *("heldout_rows_limit", "warmup_steps"),
        ),
        at_least(1),
    ),
    **dict.fromkeys(
        ("sliding_layers", "mask_token_id", "weight_decay", "eval_every", "checkpoint_every"),
        at_least(0),
    ),
    "seed": between(0, 2**31 - 1),
    "block_size": between(2, 128),
    "warmup": between(0, 1, open_high=True),
    "beta1": between(0, 1, open_high=True),
    "beta2": between(0, 1, open_high=True),
    "lr": above_zero,
    "clip": above_zero,
    "gamma": above_zero,
    "loss": one_of("decay", "dpace"),
    "precision": one_of("auto", "bf16", "fp32"),
    "verify": one_of("always", "first", "off"),
    "io": one_of("buffered", "direct"),
    "device": device_name,
}
