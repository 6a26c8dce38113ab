"""tau from held-out rows: how many drafted tokens are right, wherever a block may start.

`accepted` is computed at every candidate of the held-out documents, in passes of a fixed shape;
the mean and the walk are both read from that table. The mean compares runs. The walk moves as
decoding does and estimates what serving gives if the text is the target's own greedy output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache import Cache, FrozenTarget
from dflash_train.anchors import DraftInputs, candidates
from dflash_train.attention import Masks
from dflash_train.drafter import Drafter
from dflash_train.rows import Batch, RowBuffer, RowReader
from dflash_train.step import blocks_at, hidden_of_slots
from dflash_train.tally import accepted_length

HEAD_CHUNK = 1024  # slots whose logits exist at once


@dataclass(frozen=True)
class AcceptTable:
    """One line per candidate: A lines, P = K-1 positions.

    row int64 [A] global row; anchor int64 [A] index within it, ascending in each row; document
    int32 [A] number within the row; accepted int64 [A] leading slots that are right, supervised
    and of the document; labels int64 [A] supervised slots; right bool [A, P].
    """

    row: np.ndarray
    anchor: np.ndarray
    document: np.ndarray
    accepted: np.ndarray
    labels: np.ndarray
    right: np.ndarray


@dataclass(frozen=True)
class Acceptance:
    """Teacher-forced acceptance over held-out documents.

    tau_mean: mean of accepted + 1 over blocks with all K-1 labels; tau_short: over the others (a
    document's or answer's end), which cannot reach K; tau_walk: tokens per step of the walk.
    accuracy [K-1]: right among the supervised slots at each position; accepted_at_least [K-1]: the
    share of full blocks whose first k slots are all right. A value is nan where nothing counts.
    """

    rows: int
    documents: int
    blocks: int
    short_blocks: int
    tau_mean: float
    tau_short: float
    tau_walk: float
    accuracy: list[float]
    accepted_at_least: list[float]

    def line(self) -> str:
        """One sentence for the log."""
        return (
            f"held-out tau {self.tau_walk:.3f} walk, {self.tau_mean:.3f} mean of {self.blocks:,} "
            f"blocks ({self.short_blocks:,} short ones: {self.tau_short:.3f}) in "
            f"{self.documents:,} documents; right at slot 1: {100 * self.accuracy[0]:.1f} %"
        )


def walk(anchors: np.ndarray, accepted: np.ndarray) -> tuple[int, int]:
    """(tokens, steps) of decoding one document, given `accepted` at its ascending `anchors`.

    Starts at the first anchor; each step yields the accepted tokens and the one that the target
    adds, which is the next anchor. Where that is no candidate (a gap in the supervision) the walk
    goes on at the next one.
    """
    tokens = steps = at = 0
    while at < len(anchors):
        tokens += accepted[at] + 1
        steps += 1
        at = int(np.searchsorted(anchors, anchors[at] + accepted[at] + 1))
    return int(tokens), steps


def summarize(table: AcceptTable) -> Acceptance:
    """Mean, walk and positions, all from the one table."""
    positions = table.right.shape[1]
    full = table.labels == positions
    keys = table.row * (int(table.document.max(initial=0)) + 1) + table.document
    cuts = np.flatnonzero(np.diff(keys)) + 1
    parts = zip(np.split(table.anchor, cuts), np.split(table.accepted, cuts), strict=True)
    walks = [walk(anchors, accepted) for anchors, accepted in parts if len(anchors)]
    supervised = np.arange(positions) < table.labels[:, None]  # [A, P]
    at_least = table.accepted[full, None] > np.arange(positions)
    return Acceptance(
        rows=len(np.unique(table.row)),
        documents=len(walks),
        blocks=int(full.sum()),
        short_blocks=int((~full).sum()),
        tau_mean=_mean(table.accepted[full] + 1),
        tau_short=_mean(table.accepted[~full] + 1),
        tau_walk=_ratio(sum(t for t, _ in walks), sum(s for _, s in walks)),
        accuracy=[_mean(table.right[supervised[:, k], k]) for k in range(positions)],
        accepted_at_least=[_mean(at_least[:, k]) for k in range(positions)],
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _ratio(total: int, count: int) -> float:
    return total / count if count else float("nan")


class TeacherForced:
    """Evaluates a drafter on held-out rows; memory is allocated once, every pass has one shape.

    A pass takes one row and `anchors` of its candidates. On CUDA it is compiled at its first use,
    which belongs into the warm-up.
    """

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenTarget,
        cache: Cache,
        rows: Sequence[int],
        *,
        anchors: int,
        verify: str = "first",
    ):
        self.drafter, self.frozen, self.rows, self.anchors = drafter, frozen, rows, anchors
        self.device = frozen.embed.device
        self.codec = cache.codec(self.device)
        self.reader = RowReader(cache, verify=verify)
        cuda = self.device.type == "cuda"
        self.host = RowBuffer(cache.geometry, 1, torch.device("cpu"), pinned=cuda)
        self.buffer = RowBuffer(cache.geometry, 1, self.device) if cuda else self.host
        self.predict = self._predict
        if cuda:
            self.predict = torch.compile(self._predict, dynamic=False, fullgraph=True)

    def close(self) -> None:
        self.reader.close()

    def run(self) -> Acceptance:
        """Evaluate all rows."""
        return summarize(self.table())

    def rehearse(self) -> None:
        """One row's first pass: compiles what `run` needs and reserves its memory."""
        self.table(rows=1, passes=1)

    @torch.no_grad()
    def table(self, *, rows: int | None = None, passes: int | None = None) -> AcceptTable:
        """`accepted` at every candidate of the rows, in order; or of the first rows and passes."""
        parts = [self._row(row, passes) for row in self.rows[:rows]]
        names = ("row", "anchor", "document", "accepted", "labels", "right")
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        return AcceptTable(**dict(zip(names, columns, strict=True)))

    def _row(self, row: int, passes: int | None) -> tuple[np.ndarray, ...]:
        self.reader.fill(self.host, [row], [0])
        if self.buffer is not self.host:
            self.buffer.copy_(self.host)
        batch, host = self.buffer.batch(0, (row,)), self.host
        allowed = candidates(host.loss_mask, host.document, host.position)[0]
        places = allowed.nonzero()[:, 0].numpy()  # on the host: no sync
        places = places[: None if passes is None else passes * self.anchors]
        done = [
            self._pass(batch, places[i : i + self.anchors])
            for i in range(0, len(places), self.anchors)
        ]
        slots = self.drafter.config.block_size - 1
        right = np.concatenate([np.zeros((0, slots), bool), *(r for r, _ in done)])
        labels = np.concatenate([np.zeros(0, np.int64), *(n for _, n in done)])
        document = host.document[0].numpy()[places]
        correct = torch.from_numpy(right)
        valid = torch.from_numpy(np.arange(slots) < labels[:, None])
        accepted = accepted_length(correct, valid).long().numpy()
        return np.full(len(places), row), places, document, accepted, labels, right

    def _pass(self, batch: Batch, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """right bool [A, K-1] and labels int64 [A] of up to `anchors` candidates of one row."""
        anchors = torch.zeros(1, self.anchors, dtype=torch.int64)
        anchors[0, : len(places)] = torch.from_numpy(places)
        valid = torch.arange(self.anchors)[None] < len(places)
        blocks, masks = blocks_at(
            batch, anchors.to(self.device), valid.to(self.device), self.drafter.config
        )
        states = self.codec.decode(batch.states, batch.scales)
        right, labels = self.predict(states, batch.position, blocks, masks)
        return right[0, : len(places)].cpu().numpy(), labels[0, : len(places)].cpu().numpy()

    def _predict(
        self, states: Tensor, position: Tensor, blocks: DraftInputs, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Whether each slot is right [B, N, K-1], and the supervised slots of a block [B, N]."""
        hidden = hidden_of_slots(
            self.drafter, self.frozen.embed, states, position, blocks, masks
        )  # [B, N, K-1, D]
        flat = hidden.reshape(-1, hidden.shape[-1])
        best = [(part @ self.frozen.head.T).argmax(-1) for part in flat.split(HEAD_CHUNK)]
        right = torch.cat(best).view_as(blocks.labels) == blocks.labels
        return right, blocks.weights_valid.sum(-1).long()
