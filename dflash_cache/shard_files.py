"""Chunk files of a shard into memory that is there; a lost or damaged one is named."""

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import zstd

from dflash_cache.errors import DataError
from dflash_cache.shard_layout import ArrayLayout

# Linux reads and writes at most this many bytes a call.
READ_LIMIT = 1 << 30
# O_DIRECT wants memory, offset and size in multiples of the device's block: 4096 suits all.
ALIGN = 4096
SCRATCH = 4 << 20
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_local = threading.local()


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


def read_part(layout: ArrayLayout, row: int, start: int, out: memoryview, direct: bool) -> None:
    """Bytes of a row of a plain array from `start` on into `out`; `direct`: past the page cache.

    Any thread may read any part. What is not aligned to `ALIGN`, in memory or in the file, is read
    into aligned memory of the thread's own and copied. Raises `DataError` for a damaged chunk and
    for a file system without O_DIRECT (see `direct_problem`).
    """
    file, offset = layout.place(row)
    _pread(file, offset + start, out, layout.file_bytes, direct)


def direct_problem(file: Path) -> str | None:
    """Why `file` cannot be read with O_DIRECT, or None: tried out on its first block."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no O_DIRECT"
    try:
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(handle, [_scratch()[:ALIGN]], 0)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return f"the file system of {file} refuses O_DIRECT ({error.strerror})"
    return None


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


def _pread(file: Path, offset: int, out: memoryview, size: int, direct: bool = False) -> None:
    try:
        handle = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except FileNotFoundError as error:
        raise DataError(_damage(file, "is missing")) from error
    except OSError as error:
        raise _explained(error, file, direct) from error
    read = _read_direct if direct else _read_some
    try:
        done = 0
        while done < out.nbytes:
            try:
                got = read(handle, out[done:], offset + done)
            except OSError as error:
                raise _explained(error, file, direct) from error
            if got == 0:
                have = os.fstat(handle).st_size
                raise DataError(_damage(file, f"has {have} bytes instead of {size}"))
            done += got
    finally:
        os.close(handle)


def _explained(error: OSError, file: Path, direct: bool) -> Exception:
    """A refusal of O_DIRECT in a sentence; any other error as it is."""
    if not direct or error.errno not in _REFUSALS:
        return error
    return DataError(f"{file}: its file system refuses O_DIRECT: read it with --io buffered")


def _read_some(handle: int, out: memoryview, offset: int) -> int:
    """Some bytes of a file into the beginning of `out` -> how many; 0 at its end."""
    return os.preadv(handle, [out[:READ_LIMIT]], offset)


def _read_direct(handle: int, out: memoryview, offset: int) -> int:
    """The same through O_DIRECT: whole blocks into `out` itself if they may lie there."""
    blocks = min(out.nbytes, READ_LIMIT) // ALIGN * ALIGN
    if blocks and (address_of(out) | offset) % ALIGN == 0:
        return os.preadv(handle, [out[:blocks]], offset)
    scratch, skip = _scratch(), offset % ALIGN
    wanted = min(-(-(skip + out.nbytes) // ALIGN) * ALIGN, SCRATCH)
    got = os.preadv(handle, [scratch[:wanted]], offset - skip) - skip
    got = min(max(got, 0), out.nbytes)
    out[:got] = scratch[skip : skip + got]
    return got


def address_of(view: memoryview) -> int:
    """Where a buffer that is not empty lies in memory."""
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def _scratch() -> memoryview:
    """`SCRATCH` bytes of this thread's own, at the beginning of a page."""
    if not hasattr(_local, "scratch"):
        _local.scratch = memoryview(mmap.mmap(-1, SCRATCH))
    return _local.scratch
