"""Store a cache in another encoding: shard by shard, verified on both sides, resumable."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_cache.cache import Cache, Manifest, create_cache, is_cache
from dflash_cache.devices import choose_device
from dflash_cache.durable import nearest_folder
from dflash_cache.encoding import Codec, get_encoding
from dflash_cache.equaliser import Calibration, sample_rows
from dflash_cache.errors import DataError, UsageError
from dflash_cache.progress import Progress, format_bytes, progress
from dflash_cache.shard import Shard
from dflash_cache.shard_writer import ShardWriter, clean_staging
from dflash_cache.tapstats import add_row, empty_sums
from dflash_cache.target_files import EQUALISER, save_channel_scale

# What a shard's attributes say of where its states come from.
CARRIED = ("shard", "row_range", "kernels", "versions", "device", "dtype", "skipped")


@dataclass(frozen=True)
class ConvertSummary:
    """What a conversion did; `error` per tap is the mean relative error of a token's states."""

    encoding: str
    shards_written: int
    shards_skipped: int
    bytes_before: int
    bytes_after: int
    error: list[float]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def render(self) -> str:
        """For a person."""
        share = self.bytes_after / max(self.bytes_before, 1)
        errors = ", ".join(f"{e:.3%}" for e in self.error)
        return (
            f"{self.encoding}: {self.shards_written} shards written and verified, "
            f"{self.shards_skipped} were there; {format_bytes(self.bytes_after)}, {share:.2f} of "
            f"{format_bytes(self.bytes_before)}\nmean relative error per tap: {errors}"
        )


def convert(
    source: Path,
    destination: Path,
    encoding: str,
    *,
    device: str = "auto",
    report: Callable[[str], None] = print,
) -> ConvertSummary:
    """Re-encode the complete cache `source` into `destination`.

    Shards that are there are left alone, so that a stopped conversion may be run again. Every row
    is checked against its checksums when it is read, every shard when it has been written. Raises
    `UsageError` for what can be mended in the call, `DataError` for damage and a full disk.
    """
    get_encoding(encoding)
    have = Cache.open(source)
    if source.resolve() == destination.resolve():
        raise UsageError(f"{destination} is the cache itself; give another folder")
    if missing := have.missing():
        raise DataError(
            f"{source} lacks {len(missing)} of {have.plan.shards} shards (the first is number "
            f"{missing[0]}); finish its extraction first"
        )
    place = choose_device(device)
    if not is_cache(destination):
        _check_space(have, destination, encoding, list(range(have.plan.shards)))
    wanted = _open_destination(have, destination, encoding)
    clean_staging(wanted.staging_dir)
    todo = wanted.missing()
    _check_space(have, destination, encoding, todo)
    with progress(sum(len(wanted.plan.shard_rows(k)) for k in todo), "convert", "rows") as bar:
        for k in todo:
            _shard(have, wanted, k, place, bar)
    report(f"{destination}: complete")
    return _summary(have, wanted, len(todo))


def _open_destination(have: Cache, path: Path, encoding: str) -> Cache:
    manifest = have.manifest
    identity = dict(manifest.identity)
    if have.geometry.how.scaled and encoding != have.geometry.encoding:
        # What int8 or fp8 lost does not come back: not the cache that an extraction would make.
        identity.setdefault("converted_from", have.geometry.encoding)
    wanted: Manifest = replace(
        manifest, geometry=replace(have.geometry, encoding=encoding), identity=identity
    )

    def save_target(folder: Path) -> None:
        for file in sorted(have.target_dir.rglob("*")):
            place = folder / file.relative_to(have.target_dir)
            if file.is_dir():
                place.mkdir(exist_ok=True)
            elif file.name != EQUALISER:
                shutil.copyfile(file, place)
        if wanted.geometry.how.equalised:
            save_channel_scale(folder, _calibrate(have))

    return create_cache(path, wanted, have.plan, save_target)


def _calibrate(have: Cache) -> torch.Tensor:
    """The equaliser, float32 [T, D], from rows of the source."""
    rows, calibration = sample_rows(have.plan), Calibration()
    with progress(len(rows), "channel scale", "rows") as bar:
        for row in rows:
            shard, inside = have.locate(row)
            document = torch.from_numpy(shard.read_tokens(inside).document)
            calibration.add(have.decoded_row(row)[None], document[None])
            bar.advance()
    return calibration.result()


def _check_space(have: Cache, path: Path, encoding: str, todo: list[int]) -> None:
    rows = sum(len(have.plan.shard_rows(k)) for k in todo)
    need = rows * replace(have.geometry, encoding=encoding).stored_row_bytes
    if not is_cache(path):
        need += sum(p.stat().st_size for p in have.target_dir.rglob("*") if p.is_file())
    free = shutil.disk_usage(nearest_folder(path)).free
    if need > free:
        raise UsageError(
            f"{path} needs {format_bytes(need)}, but only {format_bytes(free)} are free; "
            "free space or give another folder"
        )


def _shard(have: Cache, wanted: Cache, k: int, place: torch.device, bar: Progress) -> None:
    old, rows = have.shard(k), wanted.plan.shard_rows(k)
    final, before, after = wanted.shard_path(k), have.codec(place), wanted.codec(place)
    with ShardWriter(
        final, wanted.staging_dir, wanted.geometry, len(rows), wanted.codec()
    ) as writer:
        for i in range(len(rows)):
            _row(old, i, writer, before, after)
            bar.advance()
        writer.finish(
            {
                **{name: old.attributes[name] for name in CARRIED if name in old.attributes},
                "manifest_digest": wanted.manifest.digest(),
                "converted_from": {
                    "encoding": have.geometry.encoding,
                    "manifest_digest": have.manifest.digest(),
                },
            }
        )
    problems = wanted.verify_shard(k)
    if problems:
        shutil.rmtree(final)
        raise DataError(f"{final} did not read back as written ({problems[0]}); check the disk")


def _row(old: Shard, i: int, writer: ShardWriter, before: Codec, after: Codec) -> None:
    problems = old.verify_row(i)
    if problems:
        raise DataError(f"{problems[0]}; remove {old.path} and run `dflash extract` again")
    tokens, states = old.read_tokens(i), _decoded(old, i, before)
    encoded = after.encode(states)
    document = torch.from_numpy(tokens.document).to(states.device)
    sums = empty_sums(states.shape[1], states.device)
    add_row(sums, after.decode(*encoded), document, states)
    scales = None if encoded.scales is None else encoded.scales.cpu().numpy()
    writer.write_row(i, encoded.states.cpu().numpy(), tokens, sums.cpu(), scales)


def _decoded(old: Shard, i: int, codec: Codec) -> torch.Tensor:
    """bf16 [S, T, D] of a row, on the codec's device."""
    g = old.geometry
    states = np.empty(g.row_shape, dtype=g.dtype)
    old.read_states(i, states)
    scales = None
    if g.how.scaled:
        scales = torch.empty(g.seq_len, g.taps)
        old.read_scales(i, scales.numpy())
        scales = scales.to(codec.device)
    return codec.decode(torch.from_numpy(states).to(codec.device), scales)


def _summary(have: Cache, wanted: Cache, written: int) -> ConvertSummary:
    shards = [wanted.shard(k) for k in range(wanted.plan.shards)]
    weights = np.array([shard.attributes["tokens"] for shard in shards], dtype=np.float64)
    errors = np.array([shard.attributes["tap_stats"]["error"] for shard in shards])
    return ConvertSummary(
        encoding=wanted.geometry.encoding,
        shards_written=written,
        shards_skipped=wanted.plan.shards - written,
        bytes_before=_bytes(have),
        bytes_after=_bytes(wanted),
        error=(weights @ errors / max(weights.sum(), 1)).tolist(),
    )


def _bytes(cache: Cache) -> int:
    """What the shards take on the disk."""
    return sum(cache.stored_bytes(k) for k in range(cache.plan.shards))
