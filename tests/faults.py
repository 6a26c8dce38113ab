"""What the tests of faults look at: a cache's digest, what was left behind, a mounted disk."""

import hashlib
import subprocess
from pathlib import Path

import pytest
import torch

from dflash_cache.cache import Cache


def digest(path: Path) -> str:
    """sha256 over the decoded states and the tokens of every row; all must be there and sound."""
    cache, hasher = Cache.open(path), hashlib.sha256()
    assert cache.missing() == []
    assert [p for k in range(cache.plan.shards) for p in cache.verify_shard(k)] == []
    assert cache.verify_target() == []
    for row in range(cache.plan.rows):
        shard, inside = cache.locate(row)
        hasher.update(cache.decoded_row(row).view(torch.uint8).numpy().tobytes())
        for name in ("input_ids", "loss_mask", "document", "position"):
            hasher.update(getattr(shard, name)[inside].tobytes())
    return hasher.hexdigest()


def leftovers(path: Path) -> list[str]:
    """What an extraction into `path` must not leave."""
    staged = [*(path / "staging").glob("*"), *path.parent.glob(".creating-*")]
    return [p.name for p in staged]


def shards(path: Path) -> int:
    """How many are there."""
    return len(list((path / "shards").glob("*.zarr")))


def flat(text: str) -> str:
    """Without click's box and line breaks."""
    return " ".join(text.replace("│", " ").split())


def mount(*arguments: object) -> None:
    """Skips the test, with the reason, where mounting is not allowed."""
    ran = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"mounting is not allowed here: {ran.stderr.strip()}")
