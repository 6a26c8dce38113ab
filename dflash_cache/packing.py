"""Documents -> Plan: which document lies where in which row of which shard, from lengths alone."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import zarr

from dflash_cache.corpus import Document
from dflash_cache.errors import DataError, UsageError, first_line
from dflash_cache.packer import pack

TRAIN, HELDOUT = 0, 1
PLAN_VERSION = 1
PLAN_ADVICE = "copy it from a backup, or extract into another folder"


@dataclass(frozen=True)
class RowTokens:
    """One row of a shard without its states; every array is [S].

    `input_ids` int32, `loss_mask` uint8, `document` int32 (0 = padding, 1.. = number within the
    row), `position` int32 (within the document). Padding is zero in all four.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    document: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class Plan:
    """Where every document lies. It depends on the documents and the geometry only.

    Per document, in the order of the corpus: `doc_row`, `doc_start`, `doc_length` (after the cut
    to S), `doc_cut` (tokens that the cut took), `doc_number` (1.. within its row), `doc_line`
    (1-based line of the source), all int32, and `doc_digest` uint64: the first 8 bytes, read as a
    big-endian number, of the sha256 of the stored ids (int32, little-endian) and mask (uint8).
    Per row: `row_split` uint8, 0 train or 1 heldout; all train rows come first.
    """

    seq_len: int
    rows_per_shard: int
    doc_row: np.ndarray
    doc_start: np.ndarray
    doc_length: np.ndarray
    doc_cut: np.ndarray
    doc_number: np.ndarray
    doc_line: np.ndarray
    doc_digest: np.ndarray
    row_split: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.row_split)

    @property
    def shards(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    @property
    def documents(self) -> int:
        return len(self.doc_row)

    @property
    def tokens(self) -> int:
        return int(self.doc_length.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """The share of all token places that hold a token (1 - padding)."""
        return self.tokens / (self.rows * self.seq_len)

    @property
    def truncated(self) -> int:
        """How many documents were longer than S and have been cut."""
        return int(np.count_nonzero(self.doc_cut))

    def shard_rows(self, shard: int) -> range:
        """The global row numbers of a shard; the last shard may have fewer."""
        if not 0 <= shard < self.shards:
            raise UsageError(
                f"shard {shard} does not exist; the plan has shards 0..{self.shards - 1}"
            )
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def row_documents(self, row: int) -> np.ndarray:
        """Indices of the documents in a row, in the order of their start."""
        order, bounds = self._by_row
        return order[bounds[row] : bounds[row + 1]]

    @cached_property
    def _by_row(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.lexsort((self.doc_start, self.doc_row))
        bounds = np.searchsorted(self.doc_row[order], np.arange(self.rows + 1))
        return order, bounds

    def digest(self) -> str:
        """sha256 over the geometry and every array: equal plans, equal digests."""
        hasher = hashlib.sha256(
            f"plan {PLAN_VERSION} {self.seq_len} {self.rows_per_shard}".encode()
        )
        for name in _array_names():
            array = getattr(self, name)
            hasher.update(f" {name} {array.dtype.str} {len(array)} ".encode())
            hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.hexdigest()


def _array_names() -> list[str]:
    return [f.name for f in fields(Plan) if f.name.startswith(("doc_", "row_"))]


def make_plan(
    documents: Sequence[Document],
    *,
    seq_len: int,
    rows_per_shard: int,
    heldout: float,
    window: int = 4096,
) -> Plan:
    """Split by source record, then pack each split into rows of `seq_len` tokens.

    `heldout` is the share of the records (not of the tokens) to hold out, 0 <= heldout < 1; with a
    share above 0 and two records or more, both splits get at least one. Raises `UsageError` for
    numbers out of range and `DataError` if there are no documents.
    """
    _check_arguments(documents, seq_len, rows_per_shard, heldout, window)
    lengths = np.array([min(len(d.input_ids), seq_len) for d in documents], dtype=np.int32)
    split = split_documents(documents, heldout)
    row, start, number = (np.zeros(len(documents), dtype=np.int32) for _ in range(3))
    row_split: list[int] = []
    for part in (TRAIN, HELDOUT):
        chosen = np.flatnonzero(split == part)
        rows, starts, numbers, used = pack(lengths[chosen], seq_len, window)
        row[chosen], start[chosen], number[chosen] = rows + len(row_split), starts, numbers
        row_split += [part] * used
    return Plan(
        seq_len=seq_len,
        rows_per_shard=rows_per_shard,
        doc_row=row,
        doc_start=start,
        doc_length=lengths,
        doc_cut=np.array([len(d.input_ids) for d in documents], dtype=np.int32) - lengths,
        doc_number=number,
        doc_line=np.array([d.line for d in documents], dtype=np.int32),
        doc_digest=np.array(
            [document_digest(d.input_ids[:seq_len], d.loss_mask[:seq_len]) for d in documents],
            dtype=np.uint64,
        ),
        row_split=np.array(row_split, dtype=np.uint8),
    )


def _check_arguments(
    documents: Sequence[Document], seq_len: int, rows_per_shard: int, heldout: float, window: int
) -> None:
    if not documents:
        raise DataError("the corpus has no documents, so there is nothing to pack")
    if seq_len < 2:
        raise UsageError(f"seq_len is {seq_len}; a row needs at least 2 tokens")
    if rows_per_shard < 1:
        raise UsageError(f"rows_per_shard is {rows_per_shard}; a shard needs at least 1 row")
    if not 0 <= heldout < 1:
        raise UsageError(f"heldout is {heldout}; give a share of the records, 0 <= heldout < 1")
    if window < 1:
        raise UsageError(f"window is {window}; packing needs a window of at least 1 document")


def split_documents(documents: Sequence[Document], heldout: float) -> np.ndarray:
    """uint8 per document, 0 train or 1 heldout, by a hash of its source record.

    All documents of a record share its split. The hash does not depend on the rest of the corpus,
    so a record keeps its split when the corpus grows.
    """
    draw = {d.record: _draw(d.record) for d in documents}
    chosen = {record for record, number in draw.items() if number < heldout * 2**64}
    if heldout > 0 and len(draw) >= 2:
        order = sorted(draw, key=lambda record: (draw[record], record))
        chosen = (chosen | {order[0]}) - {order[-1]}
    return np.array([HELDOUT if d.record in chosen else TRAIN for d in documents], dtype=np.uint8)


def _draw(record: str) -> int:
    return int.from_bytes(hashlib.sha256(f"split {record}".encode()).digest()[:8], "big")


def document_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> int:
    """What `Plan.doc_digest` holds of a document whose stored ids and mask, each [L], are these."""
    hasher = hashlib.sha256(input_ids.astype("<i4").tobytes())
    hasher.update(loss_mask.astype("u1").tobytes())
    return int.from_bytes(hasher.digest()[:8], "big")


def fill_row(plan: Plan, documents: Sequence[Document], row: int) -> RowTokens:
    """The tokens of a row as the plan lays them out; what no document covers is zero."""
    tokens = RowTokens(
        input_ids=np.zeros(plan.seq_len, dtype=np.int32),
        loss_mask=np.zeros(plan.seq_len, dtype=np.uint8),
        document=np.zeros(plan.seq_len, dtype=np.int32),
        position=np.zeros(plan.seq_len, dtype=np.int32),
    )
    for index in plan.row_documents(row):
        length = int(plan.doc_length[index])
        place = slice(int(plan.doc_start[index]), int(plan.doc_start[index]) + length)
        tokens.input_ids[place] = documents[index].input_ids[:length]
        tokens.loss_mask[place] = documents[index].loss_mask[:length]
        tokens.document[place] = plan.doc_number[index]
        tokens.position[place] = np.arange(length)
    return tokens


def save_plan(plan: Plan, path: Path) -> None:
    """Write `plan.zarr`: one zarr v3 group, one uncompressed chunk per array."""
    group = zarr.open_group(store=str(path), mode="w-", zarr_format=3)
    for name in _array_names():
        values = getattr(plan, name)
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=values.shape,
            compressors=None,
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
        )
        array[:] = values
    group.attrs.update(
        version=PLAN_VERSION,
        seq_len=plan.seq_len,
        rows_per_shard=plan.rows_per_shard,
        digest=plan.digest(),
    )


def load_plan(path: Path) -> Plan:
    """Read `plan.zarr`; `DataError` if it is missing, unreadable or not what was written."""
    try:
        group = zarr.open_group(store=str(path), mode="r", zarr_format=3)
        attributes = group.attrs.asdict()
        arrays = {name: np.asarray(group[name][:]) for name in _array_names()}  # type: ignore[index]
        plan = Plan(int(attributes["seq_len"]), int(attributes["rows_per_shard"]), **arrays)  # type: ignore[arg-type]
    except (OSError, KeyError, ValueError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path}: the plan cannot be read ({what}); {PLAN_ADVICE}") from error
    if plan.digest() != attributes.get("digest"):
        raise DataError(
            f"{path}: the plan does not match its own digest, it has been damaged; {PLAN_ADVICE}"
        )
    return plan
