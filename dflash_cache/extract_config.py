# ruff: noqa: RUF009  (option only builds a dataclasses.field)
"""Settings of `dflash extract`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cache.options import Range, at_least, between, check_ranges, option, required


@dataclass(frozen=True)
class ExtractConfig:
    """What an extraction is told; each field's `metadata` holds `help` and `unit`.

    Raises UsageError, naming the field, its value and the range, when a value is out of range.
    """

    model: str = required("the target: a folder, or the id of a model on the hub", unit="")
    data: Path = required("the corpus, a JSONL file")
    out: Path = required("folder of the cache; an unfinished one is continued")
    taps: tuple[int, ...] | None = option(
        None,
        "decoder layers whose outputs are stored, 0-based, as in 1,8,15 (tap i is transformers' "
        "hidden_states[i+1]; default: five, spread as z-lab's drafters have them)",
    )
    seq_len: int = option(4096, "length of a row; longer documents are cut", unit="tokens")
    rows_per_shard: int | None = option(
        None, "rows of a shard (default: about 1 GiB of states)", unit="rows"
    )
    batch_rows: int = option(1, "rows that the target runs at once", unit="rows")
    heldout: float = option(0.02, "share of the conversations kept out of training")
    encoding: str = option("bf16", "how states are stored")
    stream_layers: bool = option(
        False,
        "for a target that does not fit on the GPU: run a macro-batch of rows through one layer "
        "after the other, each read from the checkpoint when it is its turn; states are identical",
    )
    macro_rows: int | None = option(
        None,
        "with stream_layers: rows of a macro-batch; the whole checkpoint is read once for each "
        "(default: what fits in a quarter of the free host memory)",
        unit="rows",
    )
    compile: bool | None = option(
        None,
        "compile the target's layers, which fuses their elementwise work but takes about a minute "
        "(default: on CUDA, for a million tokens and more)",
    )
    dtype: str = option("auto", "the target's precision: float32, bfloat16, float16 or auto "
                                "(float32 on the CPU, bfloat16 on CUDA)")  # fmt: skip
    device: str = option("auto", "cuda, cuda:N, cpu, or auto: CUDA if there is any")
    revision: str | None = option(None, "revision of a hub id")
    allow_slow: bool = option(
        False,
        "run on CUDA without the fused kernels of linear attention, several times slower; without "
        "this a missing kernel is an error",
    )
    trust_remote_code: bool = option(False, "run code that the model's folder brings")
    rank: int | None = option(None, "number of this worker (default: torchrun's or SLURM's)")
    world: int | None = option(None, "number of workers (default: torchrun's or SLURM's)")
    template_options: dict[str, Any] | None = option(
        None, 'options for the chat template, as JSON: {"enable_thinking": false}'
    )
    wait: float = option(
        600.0, "how long to wait while another worker creates the cache", unit="seconds"
    )
    force: bool = option(False, "go on although the disk is too small for what is missing")

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)


_RANGES: dict[str, Range] = {
    "seq_len": at_least(2),
    "rows_per_shard": at_least(1),
    "batch_rows": at_least(1),
    "macro_rows": at_least(1),
    "heldout": between(0, 1, open_high=True),
    "rank": at_least(0),
    "world": at_least(1),
    "wait": at_least(0),
}
