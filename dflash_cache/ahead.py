"""The target runs ahead of the writer: a streamed one over whole macro-batches, which may cross
shards (the batches that they are made of never do)."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from dflash_cache.corpus import Document
from dflash_cache.equaliser import batch_arrays
from dflash_cache.packing import Plan, RowTokens, fill_row
from dflash_cache.target import Target


class Stopped(Exception):
    """A signal came within a macro-batch: its states are given up."""


class Ahead:
    """States of batches of rows, in the order of `shards`.

    `missing(k)`: that a shard is still to be made; `stop()`: that a signal has come.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan,
        documents: Sequence[Document],
        batch_rows: int,
        missing: Callable[[int], bool],
        stop: Callable[[], bool],
    ):
        self.target, self.plan, self.documents = target, plan, documents
        self.batch_rows, self.missing, self.stop = batch_rows, missing, stop
        self.world, self.shards = 1, list[int]()
        self.at_once = target.batches_at_once(batch_rows, plan.seq_len)
        self._ready: dict[int, Tensor] = {}

    def states(self, batch: range, tokens: list[RowTokens]) -> tuple[Tensor, Tensor]:
        """Rows `batch`, which hold `tokens` -> states [B, S, T, D] on the device, document [B, S].

        A short batch is filled up with padding where `target.one_shape` says so. Raises `Stopped`
        if a signal comes while a macro-batch runs.
        """
        ids, document, position = self._arrays(tokens)
        if self.at_once == 1:
            return self.target.run_rows(ids, document, position), document
        if batch.start not in self._ready:
            self._run(batch)
        return self._ready.pop(batch.start).to(self.target.device), document

    def _arrays(self, tokens: list[RowTokens]) -> tuple[Tensor, Tensor, Tensor]:
        padding = self.batch_rows - len(tokens) if self.target.one_shape else 0
        return batch_arrays(tokens, padding)

    def _run(self, batch: range) -> None:
        """A macro-batch that begins with `batch`; what is left of the last one is dropped."""
        group = list(islice(self._from(batch), self.at_once))
        tokens = [[fill_row(self.plan, self.documents, row) for row in each] for each in group]
        arrays = [self._arrays(each) for each in tokens]
        self._ready = {}
        states = self.target.run_many(arrays, between=self._check)
        self._ready = {g.start: s for g, s in zip(group, states, strict=True)}

    def _check(self) -> None:
        if self.stop():
            raise Stopped

    def _from(self, batch: range) -> Iterator[range]:
        """The batches from this one on: of its shard, then of this worker's missing ones."""
        here = batch.start // self.plan.rows_per_shard
        later = self.shards[self.shards.index(here) + 1 :]
        # Not those of another worker, which may well be done with them by then.
        ours = (k for k in later if (k - here) % self.world == 0 and self.missing(k))
        yield from (b for b in batches(self.plan, here, self.batch_rows) if b.start >= batch.start)
        for k in ours:
            yield from batches(self.plan, k, self.batch_rows)


def batches(plan: Plan, shard: int, batch_rows: int) -> Iterator[range]:
    """The rows of a shard, `batch_rows` at a time; a batch never crosses a shard."""
    rows = plan.shard_rows(shard)
    for first in range(rows.start, rows.stop, batch_rows):
        yield range(first, min(first + batch_rows, rows.stop))


def shard_order(missing: list[int], rank: int, world: int) -> list[int]:
    """This worker's shards, k % world == rank, then those of the others that are still missing.

    Those come from the far end, the next worker's first, so that few are made twice.
    """
    return sorted(missing, key=lambda k: ((k - rank) % world, k if k % world == rank else -k))
