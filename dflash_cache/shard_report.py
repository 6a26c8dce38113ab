"""What the inspector found out about a shard, and how a person reads it."""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class ArrayInfo:
    """One array: `bytes` is what its chunk files take on the disk."""

    name: str
    shape: list[int]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class TapInfo:
    """Numbers of one tap, recomputed from the data; `agrees` with the attributes' numbers.

    `error`, as recorded: mean over tokens of the encoding's error, relative to a token's size.
    `layer` is the 0-based decoder layer, None if the shard lies in no cache.
    """

    layer: int | None
    mean: float
    std: float
    absmax: float
    nonfinite: int
    agrees: bool
    error: float | None = None


@dataclass(frozen=True)
class TextRun:
    """Decoded neighbours of one document that are all supervised or all not."""

    text: str
    supervised: bool
    document: int


@dataclass
class ShardReport:
    """All about one shard. `problems` is empty if and only if nothing is wrong with it.

    `bytes_per_token`: bytes of states per real token, padding included. `split`: rows of each
    split, empty outside of a cache. `checked`: rows whose crc32c have been computed, `bad`: what
    did not agree. `text_note`: why there is no text.
    """

    path: str
    arrays: list[ArrayInfo] = field(default_factory=list)
    encoding: str = ""
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    fill: float = 0.0
    supervised_share: float = 0.0
    split: dict[str, int] = field(default_factory=dict)
    states_bytes: int = 0
    total_bytes: int = 0
    bytes_per_token: float = 0.0
    taps: list[TapInfo] = field(default_factory=list)
    checked: int = 0
    bad: list[str] = field(default_factory=list)
    kernels: Any = None
    versions: Any = None
    skipped: list[Any] = field(default_factory=list)
    text: list[TextRun] = field(default_factory=list)
    text_note: str | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def render(report: ShardReport, console: Console | None = None) -> str:
    """The report as plain text; with `console` it is printed there too, in colour if it can.

    Supervised tokens stand between ⟦ and ⟧, on a terminal they are bold green instead.
    """
    return printed(lambda colour: _parts(report, colour), console)


def printed(
    parts: Callable[[bool], Iterable[RenderableType]], console: Console | None = None
) -> str:
    """`parts(colour)` as plain text; with `console` they are printed there too."""
    plain = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
    for target in (plain, console):
        if target is not None:
            for part in parts(target.is_terminal):
                target.print(part, soft_wrap=not isinstance(part, Table), highlight=False)
    return plain.file.getvalue()  # type: ignore[attr-defined]


def _parts(report: ShardReport, colour: bool) -> Iterator[RenderableType]:
    yield facts("shard", _shard_facts(report))
    yield Text("")
    if report.arrays:
        yield _array_table(report.arrays)
    if report.taps:
        yield _tap_table(report.taps)
    yield from _text(report, colour)
    yield from problem_lines(report.problems)


def facts(title: str, named: dict[str, Any]) -> Text:
    """A title and a line for each fact; what is no text is shown as JSON."""
    width = max(len(name) for name in named)
    text = Text(title, style="bold")
    for name, value in named.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.append(f"\n  {name.ljust(width)}  {shown}", style="not bold")
    return text


def _shard_facts(report: ShardReport) -> dict[str, Any]:
    if not report.arrays:
        return {"path": report.path, "state": "damaged, its contents cannot be read"}
    split = ", ".join(f"{count} {name}" for name, count in report.split.items())
    bad = f"{len(report.bad)} bad: {'; '.join(report.bad)}" if report.bad else "all as recorded"
    return {
        "path": report.path,
        "rows": f"{report.rows}" + (f" ({split})" if split else ""),
        "documents": f"{report.documents:,}",
        "tokens": f"{report.tokens:,} ({report.fill:.1%} of the places)",
        "supervised": f"{report.supervised_share:.1%} of the tokens",
        "bytes": f"{report.states_bytes:,} of states, {report.total_bytes:,} in total",
        "bytes a token": f"{report.bytes_per_token:,.0f}",
        "encoding": report.encoding,
        "crc32c": f"{report.checked} rows checked, {bad}",
        "kernels": _kernels(report.kernels),
        "versions": _versions(report.versions),
        "skipped": skipped_reasons(report.skipped),
    }


# The attributes are read from a file that may be damaged, so any value must be shown somehow.


def _kernels(lines: Any) -> Any:
    """The headline; what each layer ran is for `--json`."""
    if not isinstance(lines, list) or not lines:
        return lines or "not recorded"
    more = " (per layer: --json)" if len(lines) > 1 else ""
    return str(lines[0]).removeprefix("kernels: ") + more


def _versions(versions: Any) -> Any:
    if not isinstance(versions, dict) or not versions:
        return versions or "not recorded"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def skipped_reasons(documents: Any) -> Any:
    """How many documents have no states here, and how many for which reason."""
    if not isinstance(documents, list) or not documents:
        return documents or "none"
    reasons = Counter(
        str(entry.get("reason", "reason not recorded")) if isinstance(entry, dict) else str(entry)
        for entry in documents
    )
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"{len(documents)} document{'s' * (len(documents) > 1)} ({told})"


def _array_table(arrays: list[ArrayInfo]) -> Table:
    table = Table("array", "shape", "dtype", box=None, pad_edge=False)
    table.add_column("bytes", justify="right")
    for array in arrays:
        table.add_row(array.name, str(array.shape), array.dtype, f"{array.bytes:,}")
    return table


def _tap_table(taps: list[TapInfo]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("tap", "layer", "mean", "std", "absmax", "error", "non-finite", "as recorded")
    for name in columns:
        table.add_column(name, justify="right")
    for i, tap in enumerate(taps):
        layer = "?" if tap.layer is None else str(tap.layer)
        numbers = [f"{value:.5g}" for value in (tap.mean, tap.std, tap.absmax)]
        numbers.append("?" if tap.error is None else f"{tap.error:.2%}")
        table.add_row(str(i), layer, *numbers, f"{tap.nonfinite:,}", "yes" if tap.agrees else "NO")
    return table


def _text(report: ShardReport, colour: bool) -> Iterator[Text]:
    if report.text_note:
        yield Text(f"\ntext: none ({report.text_note})")
    if not report.text:
        return
    mark = "bold green" if colour else f"between {OPEN} and {CLOSE}"
    text = Text(f"\nfirst tokens, supervised ones {mark}:\n")
    for before, run in zip([None, *report.text], report.text, strict=False):
        if before and before.document != run.document:
            text.append("\n---\n")
        if colour:
            text.append(run.text, style="bold green" if run.supervised else "")
        else:
            text.append(f"{OPEN}{run.text}{CLOSE}" if run.supervised else run.text)
    yield text


def problem_lines(problems: list[str]) -> Iterator[Text]:
    """How many there are, and one line each."""
    if problems:
        yield Text(f"\n{len(problems)} problem{'s' * (len(problems) > 1)}:", style="bold red")
    for problem in problems:
        yield Text(f"  {problem}", style="red")
