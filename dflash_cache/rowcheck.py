"""One row of a shard: its checksums, its place in the plan, and whether its states can be true."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError
from dflash_cache.health import extremes, what_is_wrong
from dflash_cache.packing import Plan, RowTokens, document_digest
from dflash_cache.quicklook import suspects
from dflash_cache.shard import Shard

ARRAYS = ("input_ids", "loss_mask", "document", "position")
# DataError is ours; the others come from zarr and its codecs, which read whatever is not laid out
# as this program writes it: another program's arrays, or metadata with a flipped bit.
UNREADABLE = (DataError, OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Place:
    """A document of a row: tokens `start`..`stop`-1, `number` 1.. in the row, `line` of the corpus.

    `skipped`: the shard says that it left the document out, so that its tokens are padding.
    """

    number: int
    start: int
    stop: int
    line: int
    digest: int
    skipped: bool

    @property
    def name(self) -> str:
        return f"document {self.number} (line {self.line} of the corpus)"


def skipped_documents(attributes: dict[str, Any]) -> set[tuple[int, int]]:
    """(global row, number within it) of the documents that a shard left out.

    Entries of another form count as none: the documents that they meant are then missing.
    """
    entries = attributes.get("skipped")
    found = (e for e in entries if isinstance(e, dict)) if isinstance(entries, list) else ()
    pairs = ((entry.get("row"), entry.get("document")) for entry in found)
    return {(r, d) for r, d in pairs if isinstance(r, int) and isinstance(d, int)}


def places(plan: Plan, row: int, skipped: set[tuple[int, int]]) -> Iterator[Place]:
    """The documents of a global row, as the plan has them."""
    for index in plan.row_documents(row):
        number, start = int(plan.doc_number[index]), int(plan.doc_start[index])
        yield Place(
            number,
            start,
            start + int(plan.doc_length[index]),
            int(plan.doc_line[index]),
            int(plan.doc_digest[index]),
            (row, number) in skipped,
        )


def token_problems(documents: list[Place], tokens: RowTokens) -> list[str]:
    """Whether the token arrays [S] of a row hold these documents and nothing else."""
    problems = []
    padding = np.ones(len(tokens.document), dtype=bool)
    for document in documents:
        if document.skipped:
            continue
        part = slice(document.start, document.stop)
        padding[part] = False
        wrong = _wrong_tokens(document, *(getattr(tokens, name)[part] for name in ARRAYS))
        problems += [f"{document.name}: {wrong}"] if wrong else []
    used = [name for name in ARRAYS if getattr(tokens, name)[padding].any()]
    return problems + [f"{name} is not zero where no document lies" for name in used]


def _wrong_tokens(
    document: Place, ids: np.ndarray, mask: np.ndarray, number: np.ndarray, position: np.ndarray
) -> str | None:
    length = document.stop - document.start
    here = f"tokens {document.start} to {document.stop - 1}"
    if (number != document.number).any():
        return f"the plan has it at {here}, the array `document` has not"
    if (position != np.arange(length)).any():
        return f"its positions ({here}) do not count from 0 to {length - 1}"
    if document_digest(ids, mask) != document.digest:
        return f"its ids or its loss mask ({here}) are not those that the plan was made from"
    return None


def state_problems(
    documents: list[Place], strange: np.ndarray, decode: Callable[[np.ndarray], Tensor]
) -> list[str]:
    """What is wrong with the states of a row that holds these documents.

    strange: bool [S], see `quicklook.suspects`; `decode(tokens)` gives the states bf16 [n, T, D]
    of tokens int [n]. The rule is that of `health.py`, which keeps such documents out when a cache
    is written.
    """
    problems = []
    padding = np.ones(len(strange), dtype=bool)
    for document in documents:
        if document.skipped:
            continue
        padding[document.start : document.stop] = False
        doubtful = document.start + np.flatnonzero(strange[document.start : document.stop])
        if len(doubtful):
            wrong = what_is_wrong(*extremes(decode(doubtful)[None])[0].numpy())
            problems += [f"{document.name}: {wrong}"] if wrong else []
    if bool((decode(np.flatnonzero(padding)) != 0).any()):
        problems.append("states are not zero where no document lies")
    return problems


def told(error: Exception, where: str) -> str:
    """An `UNREADABLE` error as a problem; ours name their place, zarr's do not."""
    if isinstance(error, DataError):
        return str(error)
    return f"{where} cannot be read ({str(error).splitlines()[0] if str(error) else repr(error)})"


class RowChecker:
    """Checks rows in any number of threads; each holds one row as it is stored."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.blind: str | None = None  # why states cannot be decoded, if so
        self._memory = threading.local()
        try:
            self._codec, self._channels = cache.codec(), cache.channel_scale
        except DataError as error:
            self.blind = str(error)

    def check(self, shard: Shard, inside: int, row: int) -> list[str]:
        """Problems of row `inside` of a shard, the global `row`: each names the file and the row.

        Of a row whose checksums are wrong nothing more is said.
        """
        stored, scales = self._buffers()
        try:
            shard.read_states(inside, stored)
            problems = shard.verify_row(inside, stored)
            if problems:
                return problems
            tokens = shard.read_tokens(inside)
            if scales is not None:
                shard.read_scales(inside, scales)
        except UNREADABLE as error:
            return [told(error, f"{shard.path}: row {inside} (row {row} of the cache)")]
        documents = list(places(self.cache.plan, row, skipped_documents(shard.attributes)))
        found = [(shard.path, p) for p in token_problems(documents, tokens)]
        if self.blind is None:
            file = shard.layouts[shard.geometry.how.arrays[0]].place(inside)[0]
            found += [(file, p) for p in self._states(documents, stored, scales)]
        return [f"{where}: row {inside} (row {row} of the cache), {what}" for where, what in found]

    def _states(
        self, documents: list[Place], stored: np.ndarray, scales: np.ndarray | None
    ) -> list[str]:
        def decode(tokens: np.ndarray) -> Tensor:
            some = None if scales is None else torch.from_numpy(scales[tokens])
            return self._codec.decode(torch.from_numpy(stored[tokens]), some)

        name = self.cache.geometry.encoding
        return state_problems(documents, suspects(stored, name, scales, self._channels), decode)

    def _buffers(self) -> tuple[np.ndarray, np.ndarray | None]:
        """This thread's memory: a row [S, T, D] as stored, and its scales [S, T] if it has any."""
        if not hasattr(self._memory, "buffers"):
            g = self.cache.geometry
            scales = np.empty((g.seq_len, g.taps), dtype=np.float32) if g.how.scaled else None
            self._memory.buffers = np.empty(g.row_shape, dtype=g.dtype), scales
        return self._memory.buffers
