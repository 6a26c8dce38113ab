"""Damage that a checksum does not see: change a shard, then make its checksums agree."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dflash_cache.cache import Cache
from dflash_cache.shard import Shard
from dflash_cache.shard_layout import crc32c, metadata_digest


def flip_bit(file: Path, bit: int) -> None:
    """Flip one bit of a file, counted from its start."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def alter_states(cache: Cache, row: int, change: Callable[[np.ndarray], None]) -> Path:
    """`change(bits)`, uint16 [S, T, D], in place, of a global row of a bf16 cache."""
    shard, inside = cache.locate(row)
    file = shard.layouts["states"].place(inside)[0]
    bits = np.fromfile(file, "<u2").reshape(cache.geometry.row_shape)
    change(bits)
    file.write_bytes(bits.tobytes())
    make_checksums_agree(shard.path)
    return file


def alter_tokens(cache: Cache, name: str, row: int, change: Callable[[np.ndarray], None]) -> Path:
    """`change(values)`, [S], in place, of a global row of a token array."""
    shard, inside = cache.locate(row)
    file = shard.layouts[name].place(inside)[0]
    values = np.fromfile(file, shard.layouts[name].dtype).reshape(shard.layouts[name].shape)
    change(values[inside])
    file.write_bytes(values.tobytes())
    make_checksums_agree(shard.path)
    return file


def make_checksums_agree(path: Path) -> None:
    """Write the crc32c of every row, as it is now, and the metadata digest of a plain shard."""
    shard = Shard.open(path)
    sums = shard.attributes["crc32c"]
    for name, layout in shard.layouts.items():
        for row in range(shard.rows):
            file, offset = layout.place(row)
            data = file.read_bytes()[offset : offset + layout.row_bytes]
            sums[name][row] = crc32c(data)
    edit_attributes(path, lambda attributes: attributes.update(crc32c=sums))


def edit_attributes(path: Path, change: Callable[[dict], None], *, digest: bool = True) -> None:
    """`change(attributes)` in place; with `digest` the metadata digest agrees afterwards."""
    file = path / "zarr.json"
    meta = json.loads(file.read_text())
    change(meta["attributes"])
    if digest:
        meta["attributes"]["metadata_digest"] = metadata_digest(path, meta["attributes"])
    file.write_text(json.dumps(meta, indent=2))
