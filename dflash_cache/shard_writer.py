"""Writing one shard: rows into a staging folder, attributes last, then one rename."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.storage import LocalStore

from dflash_cache.durable import publish
from dflash_cache.encoding import SCALES, STATES_HI, Codec, split_planes
from dflash_cache.geometry import Geometry
from dflash_cache.owners import A_DAY, PATTERN, Owner, newest
from dflash_cache.packing import RowTokens
from dflash_cache.shard_files import write_file
from dflash_cache.shard_layout import BY_ROW, ROW_ARRAYS, SCALE_DTYPE, crc32c, metadata_digest
from dflash_cache.tapstats import add_row, empty_sums, merge_sums, summarize

SHARD_VERSION = 1
# The zarrs pipeline writes in place, which tears a chunk when killed; zarr's own does not.
ZARR_SETTINGS = {
    "codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "async.concurrency": 4,
    "threading.max_workers": 2,
}


class ShardWriter:
    """Writes one shard; what it has written is invisible until `finish`.

    `final` is the shard's path (`.../shards/000007.zarr`), `staging_root` a folder of the same file
    system, `rows` the number of rows (fewer than R in the last shard only), `codec` the cache's,
    for the statistics (default: one without a channel scale). A context manager:
    leaving it without `finish`, by an error say, removes the staging folder.
    """

    def __init__(
        self,
        final: Path,
        staging_root: Path,
        geometry: Geometry,
        rows: int,
        codec: Codec | None = None,
    ):
        if not 1 <= rows <= geometry.rows_per_shard:
            raise ValueError(f"a shard has 1 to {geometry.rows_per_shard} rows, not {rows}")
        self.final, self.geometry, self.rows = final, geometry, rows
        self.path = staging_root / staging_name(final.name.split(".")[0])
        # The name holds this process: a folder that is there is our own, left by an error.
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._tokens = {n: np.zeros((rows, geometry.seq_len), d) for n, d in ROW_ARRAYS.items()}
        if geometry.how.scaled:
            self._tokens[SCALES] = np.zeros((rows, geometry.seq_len, geometry.taps), SCALE_DTYPE)
        self._codec = codec or Codec(geometry.encoding)
        self._crcs: dict[int, dict[str, int]] = {}
        self.published = False
        self._sums = empty_sums(geometry.taps)
        with zarr.config.set(ZARR_SETTINGS):
            self._group = zarr.create_group(store=LocalStore(self.path), zarr_format=3)
            dtype = np.dtype("u1") if geometry.how.planes else geometry.dtype
            shape = (rows, *geometry.row_shape)
            self._states = {n: self._create(n, shape, dtype) for n in geometry.how.arrays}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _create(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        attributes: dict[str, Any] = {}
        if name in BY_ROW:
            how = self.geometry.how
            attributes = {"logical_dtype": how.logical_dtype, "formula": how.formula}
        return self._group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks=(1, *shape[1:]) if name in BY_ROW else shape,
            filters=None,
            compressors=[ZstdCodec(level=1)] if name == STATES_HI else None,
            serializer=BytesCodec(endian="little"),
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=attributes,
            # Otherwise zarr leaves an all-zero chunk out, which looks like a lost one.
            config={"write_empty_chunks": True},
        )

    def write_row(
        self,
        i: int,
        states: np.ndarray,
        tokens: RowTokens,
        sums: Tensor | None = None,
        scales: np.ndarray | None = None,
    ) -> None:
        """Write row `i`: `states` [S, T, D] of the geometry's dtype (bf16: uint16), and its tokens.

        `sums`: the row's `tapstats` accumulator [7, T], if it has been computed (on the GPU, say);
        otherwise it is computed here, without the encoding error. `scales`: float32 [S, T] of a
        scaled encoding. Raises `ValueError` for a wrong row, shape or dtype.
        """
        self._check(i, states, scales)
        for name, values in self._tokens.items():
            values[i] = scales if name == SCALES else getattr(tokens, name)
        states = np.ascontiguousarray(states)
        self._write(i, states)
        merge_sums(self._sums, self._statistics(i, states, scales) if sums is None else sums)

    def _write(self, i: int, states: np.ndarray) -> None:
        parts = split_planes(states) if self.geometry.how.planes else (states,)
        self._crcs[i] = {n: crc32c(part) for n, part in zip(self._states, parts, strict=True)}
        for (name, array), part in zip(self._states.items(), parts, strict=True):
            if name == STATES_HI:
                with zarr.config.set(ZARR_SETTINGS):
                    array[i] = part
            else:
                # The chunk's file as zarr would write it, without its copy of the row.
                write_file(self.path / name / f"c.{i}.0.0.0", part)

    def _statistics(self, i: int, states: np.ndarray, scales: np.ndarray | None) -> Tensor:
        sums = empty_sums(self.geometry.taps)
        document = torch.from_numpy(self._tokens["document"][i])
        factors = None if scales is None else torch.from_numpy(np.ascontiguousarray(scales))
        add_row(sums, self._codec.decode(torch.from_numpy(states), factors), document)
        return sums

    def _check(self, i: int, states: np.ndarray, scales: np.ndarray | None) -> None:
        g = self.geometry
        if (scales is not None) != g.how.scaled:
            raise ValueError(
                f"{g.encoding} states come {'with' if g.how.scaled else 'without'} scales"
            )
        want = (self.geometry.row_shape, self.geometry.dtype)
        if (states.shape, states.dtype) != want:
            raise ValueError(f"a row is {want[1]} {want[0]}, not {states.dtype} {states.shape}")
        if not 0 <= i < self.rows or i in self._crcs:
            raise ValueError(f"row {i} has been written or is not one of the {self.rows} rows")

    def finish(self, attributes: dict[str, Any]) -> Path:
        """Write the small arrays and the attributes, flush, rename; returns the shard's path.

        `attributes` (JSON values) are the caller's: shard, row_range, manifest_digest, kernels,
        versions, skipped, ...; counts, crc32c, statistics and the metadata digest are added. If
        the shard is there already (another worker), it is left as it is, and `published` is false.
        """
        if len(self._crcs) != self.rows:
            gone = sorted(set(range(self.rows)) - self._crcs.keys())
            raise ValueError(f"rows {gone} of {self.final.name} have not been written")
        with zarr.config.set(ZARR_SETTINGS):
            for name, values in self._tokens.items():
                self._create(name, values.shape, values.dtype)[:] = values
            complete = {**attributes, **self._own_attributes()}
            complete["metadata_digest"] = metadata_digest(self.path, complete)
            self._group.attrs.update(complete)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self.published = publish(self.path, self.final)
        return self.final

    def _own_attributes(self) -> dict[str, Any]:
        crcs = {name: [self._crcs[i][name] for i in range(self.rows)] for name in self._states}
        crcs |= {name: [crc32c(row) for row in rows] for name, rows in self._tokens.items()}
        document = self._tokens["document"]
        return {
            "format_version": SHARD_VERSION,
            "encoding": self.geometry.encoding,
            "documents": sum(len(np.unique(row[row != 0])) for row in document),
            "tokens": int(np.count_nonzero(document)),
            "supervised": int(np.count_nonzero(self._tokens["loss_mask"])),
            "crc32c": crcs,
            "tap_stats": summarize(self._sums),
        }

    def abort(self) -> None:
        """Remove the staging folder, if `finish` has not moved it away."""
        shutil.rmtree(self.path, ignore_errors=True)


def staging_name(shard: str) -> str:
    """`<k>-<host>-<pid>-<start time>`"""
    return f"{shard}-{Owner.this()}"


def clean_staging(staging_root: Path) -> list[Path]:
    """Remove what dead processes of this host left, and what is older than a day.

    Returns the removed folders. Other hosts' processes cannot be seen, hence the day.
    """
    folders = staging_root.iterdir() if staging_root.is_dir() else []
    removed = [path for path in folders if _is_abandoned(path)]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _is_abandoned(path: Path) -> bool:
    match = re.fullmatch(rf"\d+-{PATTERN}", path.name)
    if match is None:
        return newest(path) < time.time() - A_DAY
    return not Owner.of(match).is_alive(path)
