"""One shard = one zarr v3 group: open it, read rows into memory that is there, check it."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from dflash_cache.encoding import ENCODINGS
from dflash_cache.errors import DataError
from dflash_cache.geometry import Geometry
from dflash_cache.packing import RowTokens
from dflash_cache.shard_layout import (
    ROW_ARRAYS,
    STATES,
    ArrayLayout,
    crc32c,
    metadata_digest,
    parse_array,
    read_json,
)
from dflash_cache.shard_writer import ShardWriter

__all__ = ["Geometry", "Shard", "ShardWriter"]

# Linux reads at most this many bytes a call.
READ_LIMIT = 1 << 30


class Shard:
    """A complete shard, opened for reading.

    Holds no file open: rows are files of their own, read with `preadv`. Any number of threads may
    read different rows at once. `attributes` are the group's; `geometry` says S, T, D.
    """

    def __init__(
        self,
        path: Path,
        attributes: dict[str, Any],
        layouts: dict[str, ArrayLayout],
        geometry: Geometry,
    ):
        self.path, self.attributes, self.geometry = path, attributes, geometry
        self.layouts = layouts
        self._zarr: dict[str, Any] = {}

    @staticmethod
    def open(path: Path | str, geometry: Geometry | None = None, *, check: bool = True) -> "Shard":
        """Parse the metadata and look at every chunk file's size.

        With `geometry` (the cache's) S, T, D and dtype must agree with it. Raises `DataError` for
        a missing shard, broken metadata, another geometry and, unless `check` is false, a missing
        or truncated chunk (which zarr would read as zeros).
        """
        path = Path(path)
        if not path.is_dir():
            raise DataError(f"{path}: there is no shard here; extract it (again)")
        group = read_json(path / "zarr.json")
        if group.get("node_type") != "group" or group.get("zarr_format") != 3:
            raise DataError(f"{path / 'zarr.json'}: this is not a group of zarr format 3")
        layouts = {name: parse_array(path, name) for name in (STATES, *ROW_ARRAYS)}
        attributes = group.get("attributes") or {}
        shard = Shard(path, attributes, layouts, geometry or _infer(layouts, attributes))
        problems = shard._shape_problems() or (shard.chunk_problems() if check else [])
        if problems:
            raise DataError(problems[0])
        return shard

    @property
    def rows(self) -> int:
        return self.layouts[STATES].shape[0]

    @property
    def plain(self) -> bool:
        """Whether the states' chunk files are the raw rows."""
        return self.layouts[STATES].plain

    # --- reading

    def read_states(self, row: int, out: np.ndarray | memoryview) -> None:
        """Fill `out`, C-contiguous, of `geometry.row_bytes` bytes, with the states of a row.

        Raises `DataError` for a missing or truncated chunk, `ValueError` for a wrong buffer.
        """
        self._check_row(row)
        self._read_row(STATES, row, _bytes(out))

    def read_tokens(self, row: int) -> RowTokens:
        """The four token arrays of a row, each [S], without reading the rest of the shard."""
        self._check_row(row)
        parts = {}
        for name, dtype in ROW_ARRAYS.items():
            parts[name] = np.empty(self.geometry.seq_len, dtype=dtype)
            self._read_row(name, row, _bytes(parts[name]))
        return RowTokens(**parts)

    @cached_property
    def input_ids(self) -> np.ndarray:
        """int32 [R, S]"""
        return self._read_all("input_ids")

    @cached_property
    def loss_mask(self) -> np.ndarray:
        """uint8 [R, S]"""
        return self._read_all("loss_mask")

    @cached_property
    def document(self) -> np.ndarray:
        """int32 [R, S], 0 where padding"""
        return self._read_all("document")

    @cached_property
    def position(self) -> np.ndarray:
        """int32 [R, S]"""
        return self._read_all("position")

    def close(self) -> None:
        """Forget what has been read; the shard may still be used."""
        self._zarr.clear()
        for name in ROW_ARRAYS:
            self.__dict__.pop(name, None)

    def _read_all(self, name: str) -> np.ndarray:
        layout = self.layouts[name]
        values = np.empty(layout.shape, dtype=layout.dtype)
        for row in range(self.rows):
            self._read_row(name, row, _bytes(values[row]))
        values.flags.writeable = False
        return values

    def _read_row(self, name: str, row: int, out: memoryview) -> None:
        layout = self.layouts[name]
        if out.nbytes != layout.row_bytes:
            raise ValueError(f"a row of {name} is {layout.row_bytes} bytes, not {out.nbytes}")
        if layout.plain:
            _pread(*layout.place(row), out, layout.file_bytes)
        else:
            values = np.ascontiguousarray(self._array(name)[row], dtype=layout.dtype)
            out[:] = _bytes(values)

    def _array(self, name: str) -> Any:
        if name not in self._zarr:
            self._zarr[name] = zarr.open_array(
                store=str(self.layouts[name].folder), mode="r", zarr_format=3
            )
        return self._zarr[name]

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} is not in {self.path.name}, which has {self.rows} rows")

    # --- checking

    def verify(self) -> list[str]:
        """Every problem found: metadata, chunk files, then the crc32c of every row; [] if none."""
        problems = self.metadata_problems() + self.chunk_problems()
        scratch = np.empty(self.layouts[STATES].row_bytes, dtype=np.uint8)
        for row in range(self.rows):
            # A row whose chunk is named already would only be named again.
            problems += [p for p in self._verify_row(row, scratch) if p not in problems]
        return problems

    def verify_row(self, row: int, states: np.ndarray | memoryview | None = None) -> list[str]:
        """Problems of one row. `states`: its bytes if they have been read already."""
        self._check_row(row)
        if states is not None:
            return self._crc_problems(row, {STATES: _bytes(states)})
        return self._verify_row(row, np.empty(self.layouts[STATES].row_bytes, dtype=np.uint8))

    def _verify_row(self, row: int, scratch: np.ndarray) -> list[str]:
        return self._crc_problems(row, {}, scratch)

    def _crc_problems(
        self, row: int, given: dict[str, memoryview], scratch: np.ndarray | None = None
    ) -> list[str]:
        problems = []
        for name, layout in self.layouts.items():
            data = given.get(name)
            try:
                if data is None:
                    data = _bytes(_buffer(layout, scratch))
                    self._read_row(name, row, data)
            except (DataError, OSError) as error:
                problems.append(str(error))
                continue
            problems += self._compare(name, row, crc32c(data))
        return problems

    def _compare(self, name: str, row: int, found: int) -> list[str]:
        recorded = self.attributes.get("crc32c")
        values = recorded.get(name) if isinstance(recorded, dict) else None
        if not isinstance(values, list) or len(values) != self.rows:
            return [f"{self.path}: the attributes hold no crc32c for each row of {name}"]
        if values[row] == found:
            return []
        file = self.layouts[name].place(row)[0].name
        return [
            f"{self.path / name / file}: row {row} of {name} has crc32c {found}, "
            f"the attributes say {values[row]}"
        ]

    def metadata_problems(self) -> list[str]:
        """Whether the attributes and the arrays' metadata are what was written."""
        if self.attributes.get("metadata_digest") == metadata_digest(self.path, self.attributes):
            return []
        return [f"{self.path}: the attributes or the arrays' zarr.json have been changed"]

    def chunk_problems(self) -> list[str]:
        """Chunk files that are missing (zarr reads zeros then) or of a wrong size."""
        return [p for layout in self.layouts.values() for p in self._chunks(layout)]

    def _chunks(self, layout: ArrayLayout) -> list[str]:
        if not layout.plain:
            array = self._array(layout.name)
            have, want = array.nchunks_initialized, array.nchunks
            gone = f"{layout.folder}: {want - have} of {want} chunks are missing"
            return [gone] if have != want else []
        return [p for file, size in layout.files().items() if (p := _file_problem(file, size))]

    def _shape_problems(self) -> list[str]:
        states, g = self.layouts[STATES], self.geometry
        want: dict[str, tuple[tuple[int, ...], np.dtype]] = {STATES: (g.row_shape, g.dtype)}
        want |= {name: ((g.seq_len,), dtype) for name, dtype in ROW_ARRAYS.items()}
        problems = [
            f"{layout.folder}: a row is {layout.dtype} {list(layout.shape[1:])}, "
            f"the cache has {want[name][1]} {list(want[name][0])}"
            for name, layout in self.layouts.items()
            if (layout.shape[1:], layout.dtype) != want[name]
        ]
        problems += [
            f"{layout.folder}: {layout.shape[0]} rows, but states has {states.shape[0]}"
            for layout in self.layouts.values()
            if layout.shape[0] != states.shape[0]
        ]
        if states.shape[0] > g.rows_per_shard:
            problems.append(f"{self.path}: more rows than the cache's {g.rows_per_shard} a shard")
        return problems


def _bytes(buffer: Any) -> memoryview:
    """The bytes of a C-contiguous buffer, not a copy."""
    return memoryview(buffer).cast("B")


def _infer(layouts: dict[str, ArrayLayout], attributes: dict[str, Any]) -> Geometry:
    rows, seq_len, taps, hidden = layouts[STATES].shape
    encoding = attributes.get("encoding", "bf16")
    if encoding not in ENCODINGS:
        raise DataError(f"{layouts[STATES].folder.parent}: the encoding {encoding!r} is not known")
    return Geometry(seq_len, rows, taps, hidden, encoding)


def _buffer(layout: ArrayLayout, scratch: np.ndarray | None) -> np.ndarray:
    if layout.name == STATES and scratch is not None:
        return scratch
    return np.empty(layout.row_bytes, dtype=np.uint8)


def _file_problem(file: Path, size: int) -> str | None:
    try:
        have = file.stat().st_size
    except FileNotFoundError:
        return _damage(file, "is missing")
    return None if have == size else _damage(file, f"has {have} bytes instead of {size}")


def _damage(file: Path, what: str) -> str:
    shard = file.parent.parent
    return f"{file}: this chunk {what}; remove {shard} and run `dflash extract` again"


def _pread(file: Path, offset: int, out: memoryview, size: int) -> None:
    try:
        handle = os.open(file, os.O_RDONLY)
    except FileNotFoundError as error:
        raise DataError(_damage(file, "is missing")) from error
    try:
        done = 0
        while done < out.nbytes:
            got = os.preadv(handle, [out[done : done + READ_LIMIT]], offset + done)
            if got == 0:
                have = os.fstat(handle).st_size
                raise DataError(_damage(file, f"has {have} bytes instead of {size}"))
            done += got
    finally:
        os.close(handle)
