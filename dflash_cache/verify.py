"""`dflash verify`: every checksum of a cache, its plan, its states; damage is named, not raised."""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError, UsageError
from dflash_cache.progress import Progress, format_seconds, progress
from dflash_cache.provenance import Provenance, ranges
from dflash_cache.rowcheck import UNREADABLE, RowChecker, places, skipped_documents, told
from dflash_cache.shard import Shard

READERS = 4  # rows in memory at once: a cold disk wants that many requests in flight
# A string of JSON (kept), or white space between its tokens.
JSON_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')

__all__ = ["Recompute", "VerifyReport", "verify"]


@dataclass(frozen=True)
class Recompute:
    """What `--recompute` asks for: `count` documents through `model`, drawn with `seed`.

    `dtype` "auto" is the precision that the cache was extracted with. Raises `UsageError` for a
    count or a model without the other.
    """

    count: int | None = None
    model: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if (self.count is None) != (self.model is None):
            raise UsageError("--recompute N and --model M are given together or not at all")


@dataclass
class VerifyReport:
    """What was checked and found. `problems` is empty if and only if nothing is damaged.

    `warnings` do not make a cache wrong; `notes` say what is not finished. rows, documents, tokens
    and bytes are those that were checked. `recomputed`: see `RecomputeReport`.
    """

    path: str
    shards: int = 0
    present: int = 0
    missing: list[int] = field(default_factory=list)
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recomputed: Any = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def render(self) -> str:
        """For a person: what was done; problems, warnings and notes were told when found."""
        lines = [
            f"{self.path}: could not be opened; nothing else was checked"
            if not self.shards
            else f"{self.path}: {self.present} of {self.shards} shards are there; checked "
            f"{self.rows:,} rows, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.bytes / 2**20:,.1f} MiB in {format_seconds(self.seconds)}"
        ]
        if self.skipped:
            lines.append(f"{self.skipped:,} documents were left out when the cache was written")
        if self.recomputed is not None:
            lines.append(self.recomputed.render())
        count = len(self.problems)
        lines.append(f"{count} problem{'s' * (count > 1)}" if count else "no problems")
        if count and self.shards:
            lines.append(
                "a damaged shard: remove it and run the same `dflash extract` again; anything "
                "else: copy it from a backup, or extract into another folder"
            )
        return "\n".join(lines)


def verify(
    path: Path | str,
    *,
    report: Callable[[str], None] = print,
    recompute: Recompute | None = None,
) -> VerifyReport:
    """Check a whole cache; `report` gets each problem, warning and note as it is found.

    Raises `UsageError` if `path` is no cache or `recompute` names another target than the cache's;
    damage never raises.
    """
    started = time.monotonic()
    job = _Job(VerifyReport(str(path)), report)
    cache = job.open(Path(path))
    if cache is not None:
        # First: another model should not be found out after hours of reading.
        asked = recompute if recompute is not None and recompute.count else None
        if asked is not None:
            from dflash_cache.recompute import check_model

            check_model(cache, asked)
        job.check(cache)
        if asked is not None:
            from dflash_cache.recompute import recompute_documents

            job.result.recomputed = recompute_documents(cache, asked, job.present)
            job.problem(*job.result.recomputed.failed)
    job.result.seconds = time.monotonic() - started
    return job.result


class _Job:
    """The checks of one cache, in order; what they find goes into `result` and to `report`."""

    def __init__(self, result: VerifyReport, report: Callable[[str], None]):
        self.result, self.report = result, report
        self.bar: Progress | None = None
        self.known: set[str] = set()
        self.present: list[int] = []
        self.provenance = Provenance()
        # Shards that were written for another manifest: one sentence if all were.
        self.foreign: dict[int, str] = {}

    def problem(self, *lines: str) -> None:
        self._tell(self.result.problems, "", lines)

    def _tell(self, into: list[str], kind: str, lines: tuple[str, ...]) -> None:
        # A chunk of the token arrays holds all rows, so that each of them names it again.
        new = [line for line in dict.fromkeys(lines) if line not in self.known]
        self.known.update(new)
        if self.bar is not None and new:
            self.bar.close()  # so that a line does not continue the bar's
        into += new
        for line in new:
            self.report(kind + line)

    def open(self, path: Path) -> Cache | None:
        manifest = path / "manifest.json"
        if not manifest.is_file() and ((path / "shards").is_dir() or (path / "plan.zarr").is_dir()):
            self.problem(f"{manifest}: the manifest is missing; without it the shards are unusable")
            return None
        try:
            return Cache.open(path)
        except DataError as error:
            self.problem(str(error))
            return None

    def check(self, cache: Cache) -> None:
        gone = set(cache.missing())
        self.present = [k for k in range(cache.plan.shards) if k not in gone]
        result = self.result
        result.shards, result.present = cache.plan.shards, len(self.present)
        result.missing = sorted(gone)
        self._tell(result.notes, "note: ", tuple(_unfinished(cache, result.missing)))
        self.problem(*(f"{cache.path}/{p}" for p in cache.verify_target()), *_strays(cache))
        self._check_shards(cache)
        self.problem(*self._foreign_problems(cache))
        self._tell(result.warnings, "warning: ", tuple(self.provenance.warnings()))

    def _check_shards(self, cache: Cache) -> None:
        checker = RowChecker(cache)
        if checker.blind:
            self.problem(f"{checker.blind}; the states are not decoded, only their checksums read")
        total = sum(len(cache.plan.shard_rows(k)) for k in self.present)
        pool = ThreadPoolExecutor(READERS, thread_name_prefix="dflash-verify")
        try:
            with progress(total, "verify", "rows") as self.bar:
                for found in _ahead(pool, checker.check, self._rows(cache), 2 * READERS):
                    self.problem(*found)
                    self.bar.advance()
        finally:
            self.bar = None
            pool.shutdown(cancel_futures=True)

    def _rows(self, cache: Cache) -> Iterator[tuple[Shard, int, int]]:
        """(shard, row in it, global row) of all that can be read; checks each shard on the way."""
        for k in self.present:
            shard = self._open_shard(cache, k)
            if shard is None:
                continue
            rows = cache.plan.shard_rows(k)
            self._count(cache, shard, rows)
            for inside, row in islice(enumerate(rows), shard.rows):
                yield shard, inside, row

    def _open_shard(self, cache: Cache, k: int) -> Shard | None:
        path = cache.shard_path(k)
        try:
            shard = Shard.open(path, cache.geometry, check=False)
        except DataError as error:
            self.problem(str(error))
            return None
        problems = shard.metadata_problems() or spelling_problems(path / "zarr.json")
        try:
            problems += shard.chunk_problems()
        except UNREADABLE as error:
            self.problem(*problems, told(error, str(path)))
            return None
        for line in cache.foreign_problems(shard, k):
            if line.startswith(f"{path.name}: attribute manifest_digest "):
                self.foreign[k] = str(path.parent / line)
            else:
                problems.append(str(path.parent / line))
        self.problem(*problems)
        self.provenance.add(k, shard.attributes)
        return shard

    def _count(self, cache: Cache, shard: Shard, rows: range) -> None:
        result, skipped = self.result, skipped_documents(shard.attributes)
        kept = [p for row in rows for p in places(cache.plan, row, skipped) if not p.skipped]
        result.rows += min(len(rows), shard.rows)
        result.documents += len(kept)
        result.tokens += sum(p.stop - p.start for p in kept)
        result.skipped += len(skipped)
        result.bytes += sum(p.stat().st_size for p in shard.path.rglob("*") if p.is_file())

    def _foreign_problems(self, cache: Cache) -> list[str]:
        if self.foreign and len(self.foreign) == len(self.present):
            count = len(self.present)
            return [
                f"{cache.path / 'manifest.json'}: this is not the manifest that the shards were "
                f"written for (all {count} repeat another digest); it has been changed"
            ]
        return list(self.foreign.values())


def _ahead(
    pool: ThreadPoolExecutor, job: Callable[..., Any], items: Iterator[tuple], depth: int
) -> Iterator[Any]:
    """Results of `job(*item)` in the order of the items; at most `depth` items are under way."""
    pending: deque[Future] = deque()
    for item in items:
        pending.append(pool.submit(job, *item))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def spelling_problems(file: Path) -> list[str]:
    """Whether a JSON file is spelt as Python writes it, white space aside.

    The metadata digest covers what the attributes mean. A flipped bit may leave that as it was
    (`1e-05` becomes `1E-05`), but tells of a disk that fails.
    """
    text = file.read_text(encoding="utf-8")
    bare, value = JSON_SPACE.sub(r"\1", text), json.loads(text)
    for ascii_only in (True, False):
        if bare == json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")):
            return []
    return [f"{file}: it says what it did, but not in the same characters: it has been changed"]


def _unfinished(cache: Cache, missing: list[int]) -> list[str]:
    """What an extraction has still to do, or has left."""
    notes = []
    if missing:
        there = cache.plan.shards - len(missing)
        notes.append(
            f"{there} of {cache.plan.shards} shards are there, {ranges(missing)} missing: "
            "run the same `dflash extract` again to finish the cache"
        )
    for folder in sorted(cache.staging_dir.glob("*")):
        notes.append(
            f"{folder}: an unfinished shard, last changed {_age(folder)} ago; "
            "`dflash extract` removes it once the process that wrote it is gone"
        )
    return notes


def _age(folder: Path) -> str:
    return format_seconds(max(time.time() - folder.stat().st_mtime, 0))


def _strays(cache: Cache) -> list[str]:
    """Shards whose numbers the plan does not have."""
    expected = {cache.shard_path(k).name for k in range(cache.plan.shards)}
    found = sorted((cache.path / "shards").glob("*.zarr"))
    return [f"{p}: the plan has no shard of that name" for p in found if p.name not in expected]
