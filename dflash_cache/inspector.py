"""What a person sees of a shard: everything is recomputed from the data (a cache: summary.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dflash_cache.cache import Cache, check_manifest_not_lost
from dflash_cache.cache_report import CacheReport, render_cache
from dflash_cache.corpus import load_tokenizer
from dflash_cache.encoding import SCALES, Codec
from dflash_cache.errors import DataError, UsageError
from dflash_cache.packing import HELDOUT
from dflash_cache.shard import Shard
from dflash_cache.shard_report import ArrayInfo, ShardReport, TapInfo, TextRun, render
from dflash_cache.summary import summarize_cache
from dflash_cache.tapstats import add_row, empty_sums, summarize

__all__ = ["CacheReport", "ShardReport", "inspect_path", "inspect_shard", "render", "show"]

# Sums in another order (on a GPU, say) differ by rounding only.
TOLERANCE = 1e-6


def inspect_path(path: Path | str, *, tokens: int = 64) -> ShardReport | CacheReport:
    """The report on a shard, or the summary of a cache, whichever lies at `path`."""
    if (Path(path) / "manifest.json").is_file():
        return summarize_cache(Cache.open(path))
    return inspect_shard(path, tokens=tokens)


def show(report: ShardReport | CacheReport, console: Console | None = None) -> str:
    """Either report as plain text; with `console` it is printed there too."""
    if isinstance(report, CacheReport):
        return render_cache(report, console)
    return render(report, console)


def inspect_shard(path: Path | str, *, tokens: int = 64, tokenizer: Any = None) -> ShardReport:
    """Read a shard as a whole and report on it.

    `tokens`: how many tokens of the first row to decode, with `tokenizer` or the one in the
    cache's `target/`. Damage is reported in `problems` and does not raise. Raises `UsageError` if
    the path is not a shard's.
    """
    path = Path(path)
    if not _looks_like_a_shard(path):
        check_manifest_not_lost(path)
        raise UsageError(f"{path} is neither a shard nor a cache; give the path of one of them")
    place = _find_cache(path)
    report = ShardReport(str(place.path), problems=list(place.problems))
    try:
        geometry = place.cache.geometry if place.cache else None
        shard = Shard.open(place.path, geometry, check=False)
    except DataError as error:
        report.problems.append(str(error))
        return report
    _fill(report, shard, place)
    _decode(report, shard, place.cache, tokens, tokenizer)
    return report


@dataclass(frozen=True)
class _Place:
    """Where the shard lies: in which cache, under which number."""

    path: Path
    cache: Cache | None = None
    number: int | None = None
    problems: tuple[str, ...] = ()


def _looks_like_a_shard(path: Path) -> bool:
    named = path.suffix == ".zarr" and path.parent.name == "shards"
    return path.is_dir() and (named or (path / "states").is_dir())


def _find_cache(path: Path) -> _Place:
    root = path.resolve().parent.parent
    if path.resolve().parent.name != "shards" or not (root / "manifest.json").is_file():
        return _Place(path)
    try:
        cache = Cache.open(root)
    except DataError as error:
        return _Place(path, problems=(str(error),))
    number = int(path.stem) if path.stem.isdigit() else -1
    if not 0 <= number < cache.plan.shards:
        return _Place(path, cache, problems=(f"{path}: the plan has no shard of that name",))
    return _Place(path, cache, number)


def _fill(report: ShardReport, shard: Shard, place: _Place) -> None:
    report.rows, report.encoding = shard.rows, shard.geometry.encoding
    report.arrays = [_array(shard, name) for name in shard.layouts]
    stored = (*shard.geometry.how.arrays, SCALES)
    report.states_bytes = sum(array.bytes for array in report.arrays if array.name in stored)
    files = [p.stat().st_size for p in shard.path.rglob("*") if p.is_file()]
    report.total_bytes = sum(files)
    for name in ("kernels", "versions", "skipped"):
        setattr(report, name, shard.attributes.get(name, getattr(report, name)))
    report.problems += shard.metadata_problems() + shard.chunk_problems()
    if place.cache is not None and place.number is not None:
        _fill_from_cache(report, shard, place.cache, place.number)
    codec = _codec(report, shard, place.cache)
    sums = _read_rows(report, shard, codec)
    _count(report, shard)
    if codec is not None:
        _fill_taps(report, shard, sums, place.cache.manifest.taps if place.cache else None)


def _codec(report: ShardReport, shard: Shard, cache: Cache | None) -> Codec | None:
    """What decodes the shard; None for an equalised one that lies in no cache."""
    try:
        return cache.codec() if cache else Codec(shard.geometry.encoding)
    except (UsageError, DataError) as error:
        report.problems.append(f"{error}: the states are not decoded, so there are no statistics")
        return None


def _array(shard: Shard, name: str) -> ArrayInfo:
    layout = shard.layouts[name]
    files = [p for p in layout.folder.rglob("*") if p.is_file() and p.name != "zarr.json"]
    size = sum(p.stat().st_size for p in files)
    return ArrayInfo(name, list(layout.shape), str(layout.dtype), size)


def _fill_from_cache(report: ShardReport, shard: Shard, cache: Cache, number: int) -> None:
    rows = cache.plan.shard_rows(number)
    split = cache.plan.row_split[rows.start : rows.stop]
    heldout = int((split == HELDOUT).sum())
    report.split = {"train": len(split) - heldout, "heldout": heldout}
    report.problems += cache.foreign_problems(shard, number)


def _read_rows(report: ShardReport, shard: Shard, codec: Codec | None) -> Tensor:
    """Check every row and add up the statistics of those that can be read."""
    sums = empty_sums(shard.geometry.taps)
    bits = np.empty(shard.geometry.row_shape, dtype=shard.geometry.dtype)
    for row in range(shard.rows):
        try:
            shard.read_states(row, bits)
            found = shard.verify_row(row, bits)
            document = shard.read_tokens(row).document
            if codec is not None:
                add_row(sums, shard.decoded(row, codec), torch.from_numpy(document))
            found += _zero_problems(row, bits, document)
        except (DataError, OSError) as error:
            found = [str(error)]
        report.checked += 1
        # A chunk of the token arrays holds all rows, so that each of them names it.
        report.bad += [problem for problem in found if problem not in report.bad]
    report.problems += [problem for problem in report.bad if problem not in report.problems]
    return sums


def _zero_problems(row: int, bits: np.ndarray, document: np.ndarray) -> list[str]:
    zero = ~bits.reshape(len(bits), -1).any(axis=1) & (document != 0)
    return [f"row {row}: {zero.sum()} tokens have all-zero states"] if zero.any() else []


def _count(report: ShardReport, shard: Shard) -> None:
    for row in range(shard.rows):
        try:
            tokens = shard.read_tokens(row)
        except (DataError, OSError):
            continue  # named by `_read_rows`
        report.tokens += int(np.count_nonzero(tokens.document))
        report.documents += len(np.unique(tokens.document[tokens.document != 0]))
        report.supervised_share += int(np.count_nonzero(tokens.loss_mask))
    report.supervised_share /= max(report.tokens, 1)
    report.fill = report.tokens / (shard.rows * shard.geometry.seq_len)
    report.bytes_per_token = report.states_bytes / max(report.tokens, 1)


def _fill_taps(
    report: ShardReport, shard: Shard, sums: Tensor, layers: tuple[int, ...] | None
) -> None:
    found = summarize(sums)
    recorded = shard.attributes.get("tap_stats")
    for tap in range(shard.geometry.taps):
        numbers = {name: values[tap] for name, values in found.items()}
        agrees = _agrees(numbers, recorded, tap)
        layer = layers[tap] if layers and tap < len(layers) else None
        error = _recorded_error(recorded, tap)
        report.taps.append(TapInfo(layer=layer, agrees=agrees, error=error, **numbers))
        # Of damaged rows the statistics must differ, which says nothing new.
        if not agrees and not report.bad:
            report.problems.append(f"tap {tap}: the attributes record other statistics")
        if numbers["nonfinite"]:
            report.problems.append(f"tap {tap}: {numbers['nonfinite']} values are not finite")


def _recorded_error(recorded: Any, tap: int) -> float | None:
    """The encoding's error, which only the extraction could measure."""
    errors = recorded.get("error") if isinstance(recorded, dict) else None
    known = isinstance(errors, list) and tap < len(errors) and isinstance(errors[tap], float)
    return errors[tap] if isinstance(errors, list) and known else None


def _agrees(numbers: dict[str, Any], recorded: Any, tap: int) -> bool:
    try:
        other = {name: float(recorded[name][tap]) for name in numbers}
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    allowed = TOLERANCE * max(numbers["absmax"], 1e-30)
    return all(abs(other[name] - numbers[name]) <= allowed for name in numbers)


def _decode(
    report: ShardReport, shard: Shard, cache: Cache | None, count: int, tokenizer: Any
) -> None:
    try:
        tokenizer = tokenizer or _cache_tokenizer(cache)
        row = shard.read_tokens(0)
    except (UsageError, DataError, OSError) as error:
        report.text_note = str(error)
        return
    used = min(count, int(np.count_nonzero(row.document)))
    document, mask = row.document[:used], row.loss_mask[:used] != 0
    changes = 1 + np.flatnonzero((np.diff(document) != 0) | (np.diff(mask.astype(int)) != 0))
    for first, last in zip([0, *changes], [*changes, used], strict=True):
        if last > first:
            text = tokenizer.decode(row.input_ids[first:last].tolist(), skip_special_tokens=False)
            report.text.append(TextRun(text, bool(mask[first]), int(document[first])))


def _cache_tokenizer(cache: Cache | None) -> Any:
    if cache is None:
        raise UsageError("the shard lies in no cache, so there is no tokenizer")
    names = [p.name for p in cache.target_dir.glob("*token*")]
    if not names:
        raise UsageError(f"{cache.target_dir} holds no tokenizer")
    return load_tokenizer(str(cache.target_dir))
