"""`dflash inspect-shard --plot`: sizes of the states by tap and position, lengths, row fill."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache
from dflash_cache.encoding import Codec
from dflash_cache.errors import DataError, UsageError
from dflash_cache.progress import progress
from dflash_cache.shard import Shard

MOST_ROWS = 64  # more are not read: the picture would not change
SLICE = 256
INK, GRID, BARS, CUT = "#333333", "#dddddd", "#4878a8", "#c8553d"


@dataclass
class PlotData:
    """What is drawn.

    Attributes:
        title: of the figure.
        layers: T names of taps.
        edges: int [B + 1], the bins of positions; absmax, norm: float [T, B], NaN where no token
            is: the largest |element|, and the mean length of a state vector.
        lengths: tokens of each document; fill: share of each row's places that hold a token.
        seq_len, cut: S, and how many documents were cut to it (0 if that is not known).
        sample: whose states were read, in words.
    """

    title: str
    layers: list[str]
    edges: np.ndarray
    absmax: np.ndarray
    norm: np.ndarray
    lengths: np.ndarray
    fill: np.ndarray
    seq_len: int
    cut: int
    sample: str


def check_plot(file: Path) -> None:
    """`UsageError` unless a picture can be drawn and written to `file`; writes nothing."""
    if file.suffix.lower() != ".png":
        raise UsageError(f"--plot {file}: a picture is a PNG; give a name that ends in .png")
    if not file.absolute().parent.is_dir() or file.is_dir():
        raise UsageError(f"--plot {file}: there is no folder for that file; create it first")
    if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--plot {file}: its folder is write protected; give another name")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib ({error}): pip install 'dflash-train[plot]'"
        ) from error


def plot(path: Path, file: Path) -> None:
    """Draw the cache or the shard at `path` into the PNG `file`, which appears whole or not at all.

    Reads the states of at most `MOST_ROWS` rows. Raises `DataError` if there is no row to read.
    """
    draw(_of_cache(path) if (path / "manifest.json").is_file() else _of_shard(path), file)


def _of_cache(path: Path) -> PlotData:
    cache = Cache.open(path)
    plan, rows = cache.plan, sorted(cache.rows("train") + cache.rows("heldout"))
    lengths = plan.doc_length
    held = np.bincount(plan.doc_row, weights=lengths, minlength=plan.rows)
    chosen = [cache.locate(row) for row in _sample(rows)]
    title = f"{path}: {plan.documents:,} documents in {plan.rows:,} rows"
    layers = [f"layer {tap}" for tap in cache.manifest.taps]
    sizes = _read(chosen, cache.codec())
    sample = f"{len(chosen):,} of {len(rows):,} rows"
    fill = held / plan.seq_len
    cut = plan.truncated
    return PlotData(title, layers, *sizes, lengths, fill, plan.seq_len, cut, sample)


def _of_shard(path: Path) -> PlotData:
    root = path.resolve().parent.parent
    cache = Cache.open(root) if (root / "manifest.json").is_file() else None
    shard = Shard.open(path, cache.geometry if cache else None)
    seq_len = shard.geometry.seq_len
    codec = cache.codec() if cache else Codec(shard.geometry.encoding)
    taps = cache.manifest.taps if cache else None
    layers = [f"layer {t}" for t in taps] if taps else [f"tap {t}" for t in _range(shard)]
    counts = [np.bincount(row[row > 0])[1:] for row in shard.document]
    lengths = np.concatenate([c[c > 0] for c in counts])
    if not len(lengths):
        raise DataError(f"{path}: the shard holds no documents, so there is nothing to draw")
    rows = _sample(list(range(shard.rows)))
    sizes = _read([(shard, row) for row in rows], codec)
    title = f"{path}: {len(lengths):,} documents in {shard.rows:,} rows"
    sample = f"{len(rows)} of {shard.rows} rows"
    fill = np.array([c.sum() for c in counts]) / seq_len
    return PlotData(title, layers, *sizes, lengths, fill, seq_len, 0, sample)


def _range(shard: Shard) -> range:
    return range(shard.geometry.taps)


def _sample(rows: list[int]) -> list[int]:
    """At most `MOST_ROWS`, the same ones each time."""
    if len(rows) <= MOST_ROWS:
        return rows
    return sorted(np.random.default_rng(0).choice(rows, MOST_ROWS, replace=False).tolist())


def position_edges(seq_len: int) -> np.ndarray:
    """Bins of positions, finest at the start: 0, 1, 2, 3, 4, 6, 8, 12, 16, ... -> int [B + 1]."""
    edges, step = [0, 1, 2, 3, 4], 2
    while edges[-1] < seq_len:
        edges += [edges[-1] + step, edges[-1] + 2 * step]
        step *= 2
    return np.array([e for e in edges if e < seq_len] + [seq_len])


def _read(rows: list[tuple[Shard, int]], codec: Codec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges [B + 1], absmax [T, B], norm [T, B]) over the real tokens of some rows."""
    if not rows:
        raise DataError("there are no shards yet, so there is nothing to draw; extract them")
    geometry = rows[0][0].geometry
    edges = position_edges(geometry.seq_len)
    bins = len(edges) - 1
    largest = np.zeros((bins, geometry.taps))
    total, count = np.zeros((bins, geometry.taps)), np.zeros(bins)
    with progress(len(rows), "plot", "rows") as bar:
        for shard, row in rows:
            tokens = shard.read_tokens(row)
            real = np.flatnonzero(tokens.document)
            place = np.searchsorted(edges, tokens.position[real], side="right") - 1
            absmax, norm = vector_sizes(shard.decoded(row, codec)[torch.from_numpy(real)])
            np.maximum.at(largest, place, absmax)
            np.add.at(total, place, norm)
            np.add.at(count, place, 1)
            bar.advance()
    empty = count == 0
    largest[empty], count[empty], total[empty] = np.nan, 1, np.nan
    return edges, largest.T, (total / count[:, None]).T


def vector_sizes(states: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """states [L, T, D] -> (largest |element|, length) of each vector, float32 [L, T] each."""
    parts = [part.float() for part in states.split(SLICE)]
    absmax = torch.cat([part.abs().amax(-1) for part in parts])
    return absmax.numpy(), torch.cat([part.norm(dim=-1) for part in parts]).numpy()


def draw(data: PlotData, file: Path) -> None:
    """Four panels, written beside `file` and renamed into its place; needs no display."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(12, 8.5), layout="constrained"
    )
    figure.suptitle(data.title, color=INK, fontsize=12)
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    _by_position(top_left, data, data.absmax, "absmax: the largest |element|")
    _by_position(top_right, data, data.norm, "norm: the mean length of a state vector")
    lines, names = top_left.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 8), frameon=False)
    _lengths(low_left, data)
    _fill(low_right, data)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    staged = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(staged, format="png", dpi=130)
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)


def _panel(axes: Any, title: str, x: str, y: str = "") -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _log_ticks(axis: Any, subs: tuple[float, ...] = (1, 2, 5)) -> None:
    """Plain numbers, 1 2 5 10 20 ..., on an axis that is logarithmic already."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _by_position(axes: Any, data: PlotData, values: np.ndarray, what: str) -> None:
    """values [T, B]: a line a tap, early layers dark; x is position + 1, so that 0 has a place."""
    shades = importlib.import_module("matplotlib").colormaps["viridis"]
    centres = np.sqrt((data.edges[:-1] + 1.0) * data.edges[1:])
    for tap, name in enumerate(data.layers):
        shade = shades(0.9 * tap / max(len(data.layers) - 1, 1))
        axes.plot(centres, values[tap], color=shade, marker="o", markersize=3, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [0, *(4**k for k in range(12) if 4**k < data.seq_len)]
    axes.set_xticks([t + 1 for t in ticks], [f"{t:,}" for t in ticks])
    axes.minorticks_off()
    _log_ticks(axes.yaxis)
    _panel(axes, f"{what} ({data.sample})", "position in the document")


def _lengths(axes: Any, data: PlotData) -> None:
    most = max(int(data.lengths.max()), 2)
    bins = np.unique(np.geomspace(max(int(data.lengths.min()), 1), most + 1, 41).astype(int))
    axes.hist(data.lengths, bins=bins, color=BARS)
    axes.set_xscale("log")
    _log_ticks(axes.xaxis)
    title = f"length of documents: mean {data.lengths.mean():,.0f} tokens"
    _panel(axes, title, "tokens", "documents")
    if data.cut:
        axes.axvline(data.seq_len, color=CUT, linewidth=1)
        note = f"{data.cut:,} were cut to {data.seq_len:,}"
        axes.text(0.02, 0.95, note, color=CUT, transform=axes.transAxes, va="top")


def _fill(axes: Any, data: PlotData) -> None:
    percent = 100 * data.fill
    axes.hist(percent, bins=np.linspace(min(percent.min(), 99.0), 100, 41), color=BARS)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    _log_ticks(axes.yaxis, (1,))
    _panel(axes, f"fill of rows: mean {percent.mean():.1f} %", "% of the places", "rows")
