"""A cache as a whole: manifest, plan, and what its shards record; no states are read."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cache.cache import Cache
from dflash_cache.cache_report import CacheReport, TapSummary
from dflash_cache.errors import DataError
from dflash_cache.packing import HELDOUT
from dflash_cache.provenance import Provenance
from dflash_cache.rowcheck import UNREADABLE, told
from dflash_cache.shard import Shard

STATISTICS = ("mean", "std", "absmax", "nonfinite")


def summarize_cache(cache: Cache) -> CacheReport:
    """The report on an open cache. Damage that its metadata shows is in `problems`; none raises."""
    report = _report(cache)
    gone = set(report.missing)
    provenance, taps = Provenance(), _TapSums(cache.geometry.taps)
    skipped: Counter[str] = Counter()
    supervised = 0
    for k in range(cache.plan.shards):
        shard = None if k in gone else _open(cache, k, report.problems)
        if shard is None:
            continue
        attributes = shard.attributes
        provenance.add(k, attributes)
        skipped.update(_reasons(attributes.get("skipped")))
        report.rows_present += shard.rows
        report.tokens_present += _count(attributes, "tokens")
        supervised += _count(attributes, "supervised")
        report.shards_bytes += folder_bytes(shard.path)
        report.problems += taps.add(shard)
    report.made_by, report.warnings = provenance.counts(), provenance.warnings()
    report.skipped = dict(skipped.most_common())
    report.supervised_share = supervised / max(report.tokens_present, 1)
    report.bytes_per_token = report.shards_bytes / max(report.tokens_present, 1)
    places = report.rows_present * cache.geometry.seq_len
    report.bytes_per_place = report.shards_bytes / max(places, 1)
    report.tap_stats = taps.summary(cache.manifest.taps)
    return report


def _report(cache: Cache) -> CacheReport:
    """What manifest and plan say."""
    manifest, plan, missing = cache.manifest, cache.plan, cache.missing()
    heldout = int((plan.row_split == HELDOUT).sum())
    return CacheReport(
        path=str(cache.path),
        target=target_name(manifest.identity),
        identity=manifest.identity,
        taps=list(manifest.taps),
        tap_convention=str(manifest.identity.get("tap_convention", "0-based decoder layers")),
        geometry=cache.geometry.to_dict(),
        created=manifest.created,
        shards=plan.shards,
        present=plan.shards - len(missing),
        missing=missing,
        rows=plan.rows,
        split={"train": plan.rows - heldout, "heldout": heldout},
        documents=plan.documents,
        tokens=plan.tokens,
        fill=plan.fill,
        truncated=plan.truncated,
        target_bytes=folder_bytes(cache.target_dir),
        plan_bytes=folder_bytes(cache.path / "plan.zarr"),
        bf16_bytes=2 * cache.geometry.taps * cache.geometry.hidden,
    )


def target_name(identity: dict[str, Any]) -> str:
    """What the manifest calls its target."""
    model = identity.get("model")
    inner = model.get("target") if isinstance(model, dict) else None
    return str(inner or identity.get("target") or "not recorded")


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _open(cache: Cache, k: int, problems: list[str]) -> Shard | None:
    """A shard whose metadata can be read; what its metadata and file sizes tell is added."""
    path = cache.shard_path(k)
    try:
        shard = Shard.open(path, cache.geometry, check=False)
        found = shard.metadata_problems() + shard.chunk_problems()
    except UNREADABLE as error:
        problems.append(told(error, str(path)))
        return None
    problems += found + [str(path.parent / p) for p in cache.foreign_problems(shard, k)]
    return shard


def _reasons(skipped: Any) -> list[str]:
    """Why documents were left out; the attributes may be of any form in a damaged shard."""
    entries = skipped if isinstance(skipped, list) else []
    given = (e.get("reason") if isinstance(e, dict) else None for e in entries)
    return [str(reason or "reason not recorded") for reason in given]


def _count(attributes: dict[str, Any], name: str) -> int:
    value = attributes.get(name)
    return value if isinstance(value, int) else 0


class _TapSums:
    """Merges the statistics that shards record of their taps, weighted by their tokens."""

    def __init__(self, taps: int):
        self.tokens, self.errors_known = 0, True
        self.mean, self.squares, self.absmax, self.error = (np.zeros(taps) for _ in range(4))
        self.nonfinite = np.zeros(taps, dtype=np.int64)

    def add(self, shard: Shard) -> list[str]:
        """A problem if the shard records no statistics that make sense."""
        try:
            recorded = shard.attributes["tap_stats"]
            mean, std, absmax, nonfinite = (
                np.array([float(x) for x in recorded[name]]) for name in STATISTICS
            )
            if {len(x) for x in (mean, std, absmax, nonfinite)} != {len(self.mean)}:
                raise DataError("a number for each tap is expected")
        except (KeyError, TypeError, ValueError) as error:
            return [f"{shard.path}: the attributes hold no statistics of the taps ({error})"]
        tokens = _count(shard.attributes, "tokens")
        self.tokens += tokens
        self.mean += tokens * mean
        self.squares += tokens * (std**2 + mean**2)
        self.absmax = np.maximum(self.absmax, absmax)
        self.nonfinite += nonfinite.astype(np.int64)
        self._add_error(recorded.get("error"), tokens)
        return []

    def _add_error(self, errors: Any, tokens: int) -> None:
        """Of bf16 there may be none recorded: then it is not known of the cache either."""
        known = isinstance(errors, list) and len(errors) == len(self.error)
        known = known and all(isinstance(e, float) and math.isfinite(e) for e in errors)
        self.errors_known &= known
        if known:
            self.error += tokens * np.array(errors)

    def summary(self, layers: tuple[int, ...]) -> list[TapSummary]:
        """A line for each tap; none if no shard recorded any."""
        if not self.tokens:
            return []
        mean = self.mean / self.tokens
        std = np.sqrt(np.clip(self.squares / self.tokens - mean**2, 0, None))
        error = self.error / self.tokens
        return [
            TapSummary(
                layer=layer,
                mean=float(mean[tap]),
                std=float(std[tap]),
                absmax=float(self.absmax[tap]),
                nonfinite=int(self.nonfinite[tap]),
                error=float(error[tap]) if self.errors_known else None,
            )
            for tap, layer in enumerate(layers)
        ]
