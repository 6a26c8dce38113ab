"""One shard = one zarr v3 group: open it, read rows into memory that is there, check it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from dflash_cache.encoding import ENCODINGS, SCALES, Codec, join_planes, split_planes
from dflash_cache.errors import DataError, first_line
from dflash_cache.geometry import Geometry
from dflash_cache.packing import RowTokens
from dflash_cache.shard_files import bytes_of, file_problem, read_row
from dflash_cache.shard_layout import (
    BY_ROW,
    ROW_ARRAYS,
    SCALE_DTYPE,
    ArrayLayout,
    array_names,
    crc32c,
    metadata_digest,
    parse_array,
    read_json,
)
from dflash_cache.shard_writer import ShardWriter

__all__ = ["Geometry", "Shard", "ShardWriter"]


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
        attributes = group.get("attributes") or {}
        encoding = _encoding(path, attributes, geometry)
        layouts = {name: parse_array(path, name) for name in array_names(ENCODINGS[encoding])}
        shard = Shard(path, attributes, layouts, geometry or _infer(layouts, encoding))
        problems = shard._shape_problems() or (shard.chunk_problems() if check else [])
        if problems:
            raise DataError(problems[0])
        return shard

    @property
    def rows(self) -> int:
        return next(iter(self.layouts.values())).shape[0]

    @property
    def plain(self) -> ArrayLayout | None:
        """The array of the states if each row of it is the bytes of one file, else None."""
        names = self.geometry.how.arrays
        return self.layouts[names[0]] if len(names) == 1 and self.layouts[names[0]].plain else None

    # --- reading

    def read_states(self, row: int, out: np.ndarray | memoryview) -> None:
        """Fill `out`, C-contiguous, of `geometry.row_bytes` bytes, with the states of a row.

        Raises `DataError` for a missing or truncated chunk, `ValueError` for a wrong buffer.
        """
        self._check_row(row)
        names = self.geometry.how.arrays
        if len(names) == 1:
            self._read_row(names[0], row, bytes_of(out))
            return
        high, low = (self._read_new(name, row) for name in names)
        join_planes(high, low, np.frombuffer(out, dtype=np.uint8))

    def read_scales(self, row: int, out: np.ndarray) -> None:
        """Fill `out`, float32 [S, T], with the scales of a row; scaled encodings only."""
        self._check_row(row)
        self._read_row(SCALES, row, bytes_of(out))

    def decoded(self, row: int, codec: Codec) -> Tensor:
        """bf16 [S, T, D]: the states of a row; `codec` is the cache's, on the CPU."""
        g = self.geometry
        states = np.empty(g.row_shape, dtype=g.dtype)
        self.read_states(row, states)
        if not g.how.scaled:
            return codec.decode(torch.from_numpy(states))
        scales = np.empty((g.seq_len, g.taps), dtype=np.float32)
        self.read_scales(row, scales)
        return codec.decode(torch.from_numpy(states), torch.from_numpy(scales))

    def read_tokens(self, row: int) -> RowTokens:
        """The four token arrays of a row, each [S], without reading the rest of the shard."""
        self._check_row(row)
        parts = {}
        for name, dtype in ROW_ARRAYS.items():
            parts[name] = np.empty(self.geometry.seq_len, dtype=dtype)
            self._read_row(name, row, bytes_of(parts[name]))
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
            self._read_row(name, row, bytes_of(values[row]))
        values.flags.writeable = False
        return values

    def _read_row(self, name: str, row: int, out: memoryview) -> None:
        layout = self.layouts[name]
        if out.nbytes != layout.row_bytes:
            raise ValueError(f"a row of {name} is {layout.row_bytes} bytes, not {out.nbytes}")
        if layout.plain or layout.packed:
            read_row(layout, row, out)
        else:
            with _through_zarr(layout):
                values = np.ascontiguousarray(self._array(name)[row], dtype=layout.dtype)
                out[:] = bytes_of(values)

    def _read_new(self, name: str, row: int) -> np.ndarray:
        """A row of an array as fresh bytes."""
        values = np.empty(self.layouts[name].row_bytes, dtype=np.uint8)
        self._read_row(name, row, bytes_of(values))
        return values

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
        for row in range(self.rows):
            # A row whose chunk is named already would only be named again.
            problems += [p for p in self.verify_row(row) if p not in problems]
        return problems

    def verify_row(self, row: int, states: np.ndarray | memoryview | None = None) -> list[str]:
        """Problems of one row. `states`: its bytes if they have been read already."""
        self._check_row(row)
        names, given = self.geometry.how.arrays, {}
        if states is not None and len(names) == 1:
            given[names[0]] = bytes_of(states)
        elif states is not None:
            bits = np.frombuffer(states, dtype=self.geometry.dtype)
            given = {n: bytes_of(v) for n, v in zip(names, split_planes(bits), strict=True)}
        return [p for name in self.layouts for p in self._crc_problems(name, row, given.get(name))]

    def _crc_problems(self, name: str, row: int, data: Any) -> list[str]:
        try:
            return self._compare(
                name, row, crc32c(self._read_new(name, row) if data is None else data)
            )
        except (DataError, OSError) as error:
            return [str(error)]

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
        if not layout.plain and not layout.packed:
            with _through_zarr(layout):
                array = self._array(layout.name)
                have, want = array.nchunks_initialized, array.nchunks
            gone = f"{layout.folder}: {want - have} of {want} chunks are missing"
            return [gone] if have != want else []
        files = layout.files().items()
        return [p for file, size in files if (p := file_problem(layout, file, size))]

    def _shape_problems(self) -> list[str]:
        g, rows = self.geometry, self.rows
        want = {name: row_of(g, name) for name in self.layouts}
        problems = [
            f"{layout.folder}: a row is {layout.dtype} {list(layout.shape[1:])}, "
            f"the cache has {want[name][1]} {list(want[name][0])}"
            for name, layout in self.layouts.items()
            if (layout.shape[1:], layout.dtype) != want[name]
        ]
        problems += [
            f"{layout.folder}: {layout.shape[0]} rows, but states has {rows}"
            for layout in self.layouts.values()
            if layout.shape[0] != rows
        ]
        if rows > g.rows_per_shard:
            problems.append(f"{self.path}: more rows than the cache's {g.rows_per_shard} a shard")
        return problems


@contextmanager
def _through_zarr(layout: ArrayLayout) -> Iterator[None]:
    """zarr tells damaged metadata by whatever exception its parts raise: one sentence instead."""
    try:
        yield
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError, OSError) as error:
        raise DataError(
            f"{layout.folder}: zarr cannot read this array ({first_line(error)}); remove "
            f"{layout.folder.parent} and run `dflash extract` again"
        ) from error


def row_of(geometry: Geometry, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a row of an array, as the geometry has it."""
    if name in BY_ROW:
        planes = geometry.how.planes
        return geometry.row_shape, np.dtype("u1") if planes else geometry.dtype
    if name == SCALES:
        return (geometry.seq_len, geometry.taps), SCALE_DTYPE
    return (geometry.seq_len,), ROW_ARRAYS[name]


def _encoding(path: Path, attributes: dict[str, Any], geometry: Geometry | None) -> str:
    """The shard's encoding; `DataError` if it is not known or not the cache's."""
    name = attributes.get("encoding", "bf16")
    if name not in ENCODINGS:
        raise DataError(f"{path}: the encoding {name!r} is not known")
    if geometry is not None and name != geometry.encoding:
        raise DataError(f"{path}: the shard is {name}, the cache {geometry.encoding}")
    return name


def _infer(layouts: dict[str, ArrayLayout], encoding: str) -> Geometry:
    rows, seq_len, taps, hidden = layouts[ENCODINGS[encoding].arrays[0]].shape
    return Geometry(seq_len, rows, taps, hidden, encoding)
