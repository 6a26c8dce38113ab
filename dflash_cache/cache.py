"""The directory of a cache: manifest, plan, target files, shards present and missing."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_cache.creating import create_once
from dflash_cache.durable import check_creatable, refusal
from dflash_cache.encoding import Codec
from dflash_cache.errors import DataError, UsageError
from dflash_cache.manifest import Manifest, identity_fields, show_value
from dflash_cache.packing import HELDOUT, TRAIN, Plan, load_plan, save_plan
from dflash_cache.shard import Shard
from dflash_cache.target_files import (
    FrozenTarget,
    digest_files,
    load_channel_scale,
    load_frozen,
    save_frozen,
)

__all__ = [
    "Cache",
    "FrozenTarget",
    "Manifest",
    "create_cache",
    "load_frozen",
    "save_frozen",
]

OPEN_SHARDS = 1024
WAIT = 600.0


class Cache:
    """An existing cache folder. Reading it takes no lock and changes nothing."""

    def __init__(self, path: Path, manifest: Manifest, plan: Plan):
        self.path, self.manifest, self.plan = path, manifest, plan
        self.geometry = manifest.geometry
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def open(path: Path | str) -> "Cache":
        """Open a cache: `UsageError` if there is none, `DataError` if it is damaged."""
        path = Path(path)
        file = path / "manifest.json"
        if not file.is_file():
            check_manifest_not_lost(path)
            what = "there is no manifest.json in it" if path.is_dir() else "there is no such folder"
            raise UsageError(f"{path} is not a cache: {what}")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: the manifest is not UTF-8 text ({error})") from error
        manifest = Manifest.from_json(text, str(file))
        plan = load_plan(path / "plan.zarr")
        if plan.digest() != manifest.plan_digest:
            raise DataError(f"{path}: plan.zarr is not the plan that manifest.json names")
        return Cache(path, manifest, plan)

    @property
    def target_dir(self) -> Path:
        return self.path / "target"

    @property
    def staging_dir(self) -> Path:
        return self.path / "staging"

    def shard_path(self, k: int) -> Path:
        """`shards/000012.zarr`; it exists if and only if the shard is complete."""
        return self.path / "shards" / f"{k:06d}.zarr"

    def stored_bytes(self, k: int) -> int:
        """What the files of a shard take on the disk."""
        return sum(p.stat().st_size for p in self.shard_path(k).rglob("*") if p.is_file())

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there (yet)."""
        return [k for k in range(self.plan.shards) if not self.shard_path(k).is_dir()]

    def shard(self, k: int) -> Shard:
        """The opened shard `k`; thread safe, the last `OPEN_SHARDS` stay open."""
        with self._lock:
            if k in self._shards:
                self._shards.move_to_end(k)
                return self._shards[k]
        shard = Shard.open(self.shard_path(k), self.geometry)
        with self._lock:
            self._shards[k] = shard
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
        return shard

    def rows(self, split: str) -> list[int]:
        """Global row numbers of `"train"` or `"heldout"` in the shards that are present."""
        if split not in ("train", "heldout"):
            raise UsageError(f"split {split!r} is not known; it is 'train' or 'heldout'")
        wanted = TRAIN if split == "train" else HELDOUT
        rows = np.flatnonzero(self.plan.row_split == wanted)
        gone = self.missing()
        return rows[~np.isin(rows // self.geometry.rows_per_shard, gone)].tolist()

    def locate(self, row: int) -> tuple[Shard, int]:
        """(shard, row within it) of a global row number."""
        if not 0 <= row < self.plan.rows:
            raise UsageError(
                f"row {row} does not exist; the cache has rows 0..{self.plan.rows - 1}"
            )
        k, inside = divmod(row, self.geometry.rows_per_shard)
        return self.shard(k), inside

    @cached_property
    def channel_scale(self) -> Tensor | None:
        """The equaliser of the channels, float32 [T, D]; None for encodings without one."""
        if not self.geometry.how.equalised:
            return None
        scale = load_channel_scale(self.target_dir)
        if scale.shape != (self.geometry.taps, self.geometry.hidden):
            raise DataError(
                f"{self.target_dir}: the channel scale is {list(scale.shape)}, the cache has "
                f"{self.geometry.taps} taps of {self.geometry.hidden} channels"
            )
        return scale

    def codec(self, device: torch.device | str = "cpu") -> Codec:
        """What decodes (and encodes) this cache's states on a device."""
        return Codec(self.geometry.encoding, self.channel_scale, device)

    def decoded_row(self, row: int) -> Tensor:
        """bf16 [S, T, D] on the CPU: the states of a global row, whatever the encoding."""
        shard, inside = self.locate(row)
        return shard.decoded(inside, self.codec())

    def check_identity(self, wanted: Manifest) -> None:
        """`UsageError` naming the first field in which this cache is not the wanted one."""
        for name, have, want in identity_fields(self.manifest, wanted):
            if have != want:
                raise UsageError(
                    f"this cache was made for {name} {show_value(have)}, not {show_value(want)}; "
                    f"use another --out or the same {name} ({self.path})"
                )

    def verify_target(self) -> list[str]:
        """Problems of the files in `target/`: missing, unexpected or changed ones."""
        have, want = digest_files(self.target_dir), self.manifest.target_digest
        problems = [f"target/{name}: missing" for name in sorted(want.keys() - have.keys())]
        problems += [
            f"target/{name}: its sha256 is not the one in manifest.json"
            for name in sorted(want.keys() & have.keys())
            if want[name] != have[name]
        ]
        return problems

    def verify_shard(self, k: int) -> list[str]:
        """All problems of a shard: its own files, and whether it belongs to this cache."""
        path = self.shard_path(k)
        try:
            shard = Shard.open(path, self.geometry, check=False)
        except DataError as error:
            return [str(error)]
        return shard.verify() + self.foreign_problems(shard, k)

    def foreign_problems(self, shard: Shard, k: int) -> list[str]:
        """Whether an opened shard belongs to this cache, as its number `k`."""
        rows = self.plan.shard_rows(k)
        attributes, name = shard.attributes, shard.path.name
        expected = {"manifest_digest": self.manifest.digest(), "row_range": [rows.start, rows.stop]}
        problems = [
            f"{name}: attribute {key} is {attributes.get(key)!r}, this cache expects {value!r}"
            for key, value in expected.items()
            if attributes.get(key) != value
        ]
        if shard.rows != len(rows):
            problems.append(f"{name}: {shard.rows} rows, the plan has {len(rows)}")
        want = int(np.isin(self.plan.doc_row, rows).sum())
        have, left_out = attributes.get("documents"), attributes.get("skipped")
        skipped = len(left_out) if isinstance(left_out, list) else 0
        if not isinstance(have, int) or have + skipped != want:
            problems.append(
                f"{name}: {have} documents and {skipped} skipped, the plan has {want} in its rows"
            )
        return problems


def create_cache(
    path: Path | str,
    manifest: Manifest,
    plan: Plan,
    save_target: Callable[[Path], None],
    *,
    wait: float = WAIT,
    report: Callable[[str], None] = lambda _: None,
) -> Cache:
    """Create the cache folder, or open the one that is there if it is the same.

    `save_target(folder)` writes the files of `target/`. All is written beside the final place and
    renamed into it; other processes that want the same cache meanwhile wait for it, `wait` seconds
    at most, and open it. Raises `DataError` naming the field if an existing cache is another one,
    if the disk is full or the wait too long, `UsageError` if `path` cannot be created.
    """
    path = Path(path)

    def build(staged: Path) -> None:
        _fill_new(staged, manifest, plan, save_target)

    try:
        create_once(path, lambda: is_cache(path), build, wait, report)
    except OSError as error:
        if error.errno is None:
            raise
        raise refusal(path, error) from error
    cache = Cache.open(path)
    cache.check_identity(manifest)
    return cache


def is_cache(path: Path) -> bool:
    """Whether there is a cache; `UsageError` if there is none and none could be created."""
    if os.path.isfile(path / "manifest.json"):
        return True
    check_creatable(path)
    empty = not os.path.exists(path) or (path.is_dir() and not any(path.iterdir()))
    # Looked at in this order: another process may create the cache at this very moment.
    if empty or os.path.isfile(path / "manifest.json"):
        return not empty
    check_manifest_not_lost(path)
    raise UsageError(f"{path} exists and is not a cache; give another --out or remove it")


def check_manifest_not_lost(path: Path) -> None:
    """`DataError` for a folder that was a cache and has lost its manifest."""
    parts = [name for name in ("shards", "plan.zarr") if (path / name).is_dir()]
    if parts and not (path / "manifest.json").exists():
        raise DataError(
            f"{path / 'manifest.json'}: the manifest of this cache is missing, its {parts[0]} is "
            "there; copy the manifest from a backup, or extract into another folder"
        )


def _fill_new(
    staged: Path, manifest: Manifest, plan: Plan, save_target: Callable[[Path], None]
) -> None:
    for name in ("target", "staging", "shards"):
        (staged / name).mkdir()
    save_target(staged / "target")
    save_plan(plan, staged / "plan.zarr")
    manifest = replace(
        manifest, plan_digest=plan.digest(), target_digest=digest_files(staged / "target")
    )
    (staged / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
