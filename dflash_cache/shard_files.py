"""Chunk files of a shard into memory that is there; a lost or damaged one is named."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import zstd

from dflash_cache.errors import DataError
from dflash_cache.shard_layout import ArrayLayout

# Linux reads and writes at most this many bytes a call.
READ_LIMIT = 1 << 30


def bytes_of(buffer: Any) -> memoryview:
    """The bytes of a C-contiguous buffer, not a copy."""
    return memoryview(buffer).cast("B")


def read_row(layout: ArrayLayout, row: int, out: memoryview) -> None:
    """A row of a plain or packed array into `out`; `DataError` names a damaged chunk."""
    file, offset = layout.place(row)
    if layout.plain:
        _pread(file, offset, out, layout.file_bytes)
    else:
        _decompress(file, out)


def file_problem(layout: ArrayLayout, file: Path, size: int) -> str | None:
    """Whether a chunk file is missing, or has a size that it cannot have; reads nothing."""
    try:
        have = file.stat().st_size
    except FileNotFoundError:
        return _damage(file, "is missing")
    if layout.packed:
        return None if have else _damage(file, "is empty")
    return None if have == size else _damage(file, f"has {have} bytes instead of {size}")


def write_file(file: Path, data: np.ndarray) -> None:
    """A new file of the bytes of a C-contiguous array; not flushed."""
    view, done = bytes_of(data), 0
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while done < view.nbytes:
            done += os.write(handle, view[done : done + READ_LIMIT])
    finally:
        os.close(handle)


def _damage(file: Path, what: str) -> str:
    shard = file.parent.parent
    return f"{file}: this chunk {what}; remove {shard} and run `dflash extract` again"


def _decompress(file: Path, out: memoryview) -> None:
    try:
        zstd.decompress(file.read_bytes(), out)
    except FileNotFoundError as error:
        raise DataError(_damage(file, "is missing")) from error
    except (RuntimeError, ValueError) as error:
        raise DataError(_damage(file, f"cannot be decompressed ({error})")) from error


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
