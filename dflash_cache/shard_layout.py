"""How the arrays of a shard lie on the disk: parsed from zarr.json once, trusted only if plain."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from dflash_cache.encoding import SCALES, STATES, STATES_HI, STATES_LO, Encoding
from dflash_cache.errors import DataError

ROW_ARRAYS: dict[str, np.dtype] = {
    "input_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "document": np.dtype("<i4"),
    "position": np.dtype("<i4"),
}
# Arrays with a chunk of their own for each row; the others are one chunk as a whole.
BY_ROW = (STATES, STATES_HI, STATES_LO)
SCALE_DTYPE = np.dtype("<f4")
DIMENSIONS = {**dict.fromkeys(BY_ROW, 4), SCALES: 3, **dict.fromkeys(ROW_ARRAYS, 2)}
# google_crc32c holds the GIL during a call, so that large buffers are fed in slices.
CRC_SLICE = 4 << 20


def crc32c(data: Any) -> int:
    """crc32c (Castagnoli) of a C-contiguous buffer's bytes."""
    view = np.frombuffer(data, dtype=np.uint8)
    crc = 0
    for first in range(0, view.size, CRC_SLICE):
        crc = google_crc32c.extend(crc, view[first : first + CRC_SLICE])  # type: ignore[arg-type]
    return crc


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `DataError` naming the file if it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: this metadata file cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: this metadata file holds {type(value).__name__}, not an object")
    return value


def array_names(encoding: Encoding) -> tuple[str, ...]:
    """The arrays of a shard: those of the states first."""
    scales = (SCALES,) if encoding.scaled else ()
    return (*encoding.arrays, *scales, *ROW_ARRAYS)


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a shard, its chunks as DESIGN has them: one a row for states, else one in all.

    `plain`: the chunk files are the raw little-endian bytes; `packed`: those, as one zstd frame.
    With neither, zarr reads them.
    """

    name: str
    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    plain: bool
    packed: bool = False

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def rows_per_file(self) -> int:
        return 1 if self.name in BY_ROW else self.shape[0]

    def place(self, row: int) -> tuple[Path, int]:
        """(file, byte offset) of a row of a plain array."""
        chunk, inside = divmod(row, self.rows_per_file)
        tail = ".0" * (len(self.shape) - 1)
        return self.folder / f"c.{chunk}{tail}", inside * self.row_bytes

    @property
    def file_bytes(self) -> int:
        """The bytes of each chunk: of its file, if the array is plain."""
        return self.rows_per_file * self.row_bytes

    def files(self) -> dict[Path, int]:
        """Every chunk file of a plain or packed array, and the bytes of its chunk."""
        return {
            self.place(r)[0]: self.file_bytes for r in range(0, self.shape[0], self.rows_per_file)
        }


def parse_array(shard: Path, name: str) -> ArrayLayout:
    """Read `<name>/zarr.json`; `DataError` if it is missing, broken or of another kind."""
    file = shard / name / "zarr.json"
    meta = read_json(file)
    try:
        shape = tuple(int(n) for n in meta["shape"])
        dtype = np.dtype(meta["data_type"]).newbyteorder("<")
        codecs = _codecs(meta, name, shape, dtype)
        kind = (meta["zarr_format"], meta["node_type"], len(shape))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: this is not the metadata of an array ({error!r})") from error
    if kind != (3, "array", DIMENSIONS[name]) or min(shape) < 1:
        raise DataError(f"{file}: this is not the metadata of a {name} array of zarr format 3")
    plain = codecs == ["bytes"]
    packed = codecs == ["bytes", "zstd"] and name in BY_ROW
    return ArrayLayout(name, shard / name, shape, dtype, plain, packed)


def _codecs(meta: dict[str, Any], name: str, shape: tuple[int, ...], dtype: np.dtype) -> list[str]:
    """Names of the codecs, if all else is laid out as this program writes it; else none."""
    codecs = [dict(codec) for codec in meta["codecs"]]
    endian = codecs[0].get("configuration", {}).get("endian") if codecs else None
    keys = meta["chunk_key_encoding"]
    grid = meta["chunk_grid"]
    chunk = (1, *shape[1:]) if name in BY_ROW else shape
    ours = (
        bool(codecs)
        and (endian == "little" or (endian is None and dtype.itemsize == 1))
        and keys["name"] == "default"
        and keys.get("configuration", {}).get("separator") == "."
        and grid["name"] == "regular"
        and tuple(grid["configuration"]["chunk_shape"]) == chunk
        and not meta.get("storage_transformers")
    )
    return [codec["name"] for codec in codecs] if ours else []


def metadata_digest(shard: Path, attributes: dict[str, Any]) -> str:
    """sha256 hex over the arrays' metadata files and the group's attributes.

    Fed in this order: for each array folder by name, `<name>\\0`, the bytes of its zarr.json; then
    the attributes without `metadata_digest` as JSON (sorted keys, no spaces, UTF-8).
    """
    hasher = hashlib.sha256()
    for file in sorted(shard.glob("*/zarr.json")):
        hasher.update(file.parent.name.encode() + b"\0" + file.read_bytes())
    rest = {key: value for key, value in attributes.items() if key != "metadata_digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    hasher.update(text.encode())
    return hasher.hexdigest()
