"""What the summary of a cache says, and how a person reads it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_cache.provenance import ranges
from dflash_cache.shard_report import facts, printed, problem_lines

PLACES = ("kernels", "device", "dtype")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class TapSummary:
    """Numbers of one tap over all shards that are there, merged from what these record.

    `layer`: 0-based decoder layer. `error`: mean over tokens of the encoding's error, relative to
    a token's size; None if a shard does not record it.
    """

    layer: int
    mean: float
    std: float
    absmax: float
    nonfinite: int
    error: float | None


@dataclass
class CacheReport:
    """All about one cache. Nothing of the states has been read: `dflash verify` does that.

    rows, documents, tokens, fill, truncated and `split` (rows of each) are the plan's, for the
    finished cache; rows_present, tokens_present, supervised_share and all below are those of the
    shards that are there. `bytes_per_token` holds all files of a shard against its real tokens,
    `bytes_per_place` against all token places, `bf16_bytes` is what T x D numbers of bf16 take.
    `made_by`: {name: {value: number of shards}}. `skipped`: {reason: documents}.
    """

    path: str
    target: str
    identity: dict[str, Any]
    taps: list[int]
    tap_convention: str
    geometry: dict[str, Any]
    created: str
    shards: int
    present: int
    missing: list[int]
    rows: int
    split: dict[str, int]
    documents: int
    tokens: int
    fill: float
    truncated: int
    rows_present: int = 0
    tokens_present: int = 0
    supervised_share: float = 0.0
    shards_bytes: int = 0
    target_bytes: int = 0
    plan_bytes: int = 0
    bytes_per_token: float = 0.0
    bytes_per_place: float = 0.0
    bf16_bytes: int = 0
    made_by: dict[str, dict[str, int]] = field(default_factory=dict)
    tap_stats: list[TapSummary] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def render_cache(report: CacheReport, console: Console | None = None) -> str:
    """The report as plain text; with `console` it is printed there too."""
    return printed(lambda _: _parts(report), console)


def _parts(report: CacheReport) -> Iterator[RenderableType]:
    yield facts("cache", _facts(report))
    if report.tap_stats:
        yield Text("")
        yield _tap_table(report.tap_stats)
    for warning in report.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    yield from problem_lines(report.problems)


def _facts(r: CacheReport) -> dict[str, Any]:
    g = r.geometry
    layers = ", ".join(str(tap) for tap in r.taps)
    split = ", ".join(f"{count:,} {name}" for name, count in r.split.items())
    missing = f", {ranges(r.missing)} missing" if r.missing else ""
    named = {
        "path": r.path,
        "target": r.target,
        "taps": f"layers {layers} ({r.tap_convention})",
        "geometry": f"{g['seq_len']:,} tokens a row, {g['rows_per_shard']:,} rows a shard, "
        f"{g['taps']} taps of {g['hidden']:,} values",
        "encoding": g["encoding"],
        "shards": f"{r.present} of {r.shards} are there{missing}",
        "rows": f"{r.rows:,} ({split})",
        "documents": f"{r.documents:,} ({r.truncated:,} cut to {g['seq_len']:,} tokens)",
        "tokens": f"{r.tokens:,} ({r.fill:.1%} of the places)",
        "created": r.created,
    }
    return named | (_facts_of_shards(r) if r.present else {})


def _facts_of_shards(r: CacheReport) -> dict[str, Any]:
    versions = {name: values for name, values in r.made_by.items() if name not in PLACES}
    reasons = ", ".join(f"{count} {reason}" for reason, count in r.skipped.items())
    count = sum(r.skipped.values())
    return {
        "supervised": f"{r.supervised_share:.1%} of the tokens",
        "bytes": f"{size(r.shards_bytes)} of shards, {size(r.target_bytes)} of target files, "
        f"{size(r.plan_bytes)} of plan",
        "bytes a token": f"{r.bytes_per_token:,.0f}, padding left out {r.bytes_per_place:,.0f} "
        f"({r.bytes_per_place / r.bf16_bytes:.2f} of {r.bf16_bytes:,} in bf16)",
        **{name: _shares(r.made_by.get(name, {}), r.present) for name in PLACES},
        "versions": ", ".join(f"{n} {_shares(v, r.present)}" for n, v in versions.items())
        or "not recorded",
        "skipped": f"{count} document{'s' * (count > 1)} ({reasons})" if count else "none",
    }


def _shares(values: dict[str, int], present: int) -> str:
    """One value alone; of several how many shards have each."""
    if len(values) == 1 and next(iter(values.values())) == present:
        return next(iter(values))
    return " / ".join(f"{value} ({n} of {present} shards)" for value, n in values.items())


def size(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"


def _tap_table(taps: list[TapSummary]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tap", "layer", "mean", "std", "absmax", "non-finite", "encoding error"):
        table.add_column(name, justify="right")
    for i, tap in enumerate(taps):
        numbers = [f"{value:.5g}" for value in (tap.mean, tap.std, tap.absmax)]
        error = "?" if tap.error is None else f"{tap.error:.3%}"
        table.add_row(str(i), str(tap.layer), *numbers, f"{tap.nonfinite:,}", error)
    return table
