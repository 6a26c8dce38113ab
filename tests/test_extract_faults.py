"""Real processes that are killed, stopped, starved of disk or set against each other.

What must hold: a shard is there whole or not at all, and whatever happened, running the same
command again gives the very cache of an undisturbed run.
"""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_cache.cache import Cache
from dflash_cache.inspector import inspect_shard
from dflash_train.stream import RowStream
from tests.faults import digest, flat, leftovers, mount, shards
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_hybrid
from tests.zygote import ROOT, Child, Zygote, until

SEQ_LEN, ROWS = 64, 40
KILLS, BEFORE = 30, "before there was a cache"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads"]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("m") / "hybrid"
    return tiny_hybrid(folder, tiny_tokenizer(), layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("d") / "corpus.jsonl"
    lines = (rng.integers(5, 300, n).tolist() for n in rng.integers(20, SEQ_LEN, 4 * ROWS // 3))
    records = ({"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in lines)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def words(model, data) -> list[object]:
    """Everything but --out."""
    common = ["extract", "--model", model, "--data", data, "--taps", "0,1", "--device", "cpu"]
    return [*common, "--seq-len", SEQ_LEN, "--rows-per-shard", 2, "--heldout", 0.1]


@pytest.fixture(scope="module")
def undisturbed(zygote, words, tmp_path_factory) -> dict[str, str]:
    """encoding -> digest of a run that nothing disturbs."""
    root, found = tmp_path_factory.mktemp("u"), {}
    for encoding in ("bf16", "int8"):
        code, text = zygote.run([*words, "--out", root / encoding, "--encoding", encoding], root)
        assert code == 0, text
        found[encoding] = digest(root / encoding)
    return found


# --- kill -9


@pytest.mark.slow
def test_kill_9_at_random_moments_changes_nothing(zygote, words, undisturbed, tmp_path, capsys):
    rng, kills, rounds = random.Random(0), Counter[str](), 0
    while kills.total() < KILLS:
        encoding = ("bf16", "int8")[rounds % 2]
        out = tmp_path / f"{rounds}-{encoding}"
        command = [*words, "--out", out, "--encoding", encoding]
        for world in (1, 3, 2):
            for child in workers(zygote, command, world, tmp_path):
                kills += kill(child, out, rng)
        assert [c.wait() for c in workers(zygote, command, 2, tmp_path)] == [0, 0]
        assert digest(out) == undisturbed[encoding]
        assert leftovers(out) == []
        rounds += 1
    with capsys.disabled():
        when = ", ".join(f"{n} {phase}" for phase, n in kills.items())
        print(f"\n{kills.total()} kills ({when}) in {rounds} extractions, all equal to undisturbed")


def workers(zygote: Zygote, command: list[object], world: int, folder: Path) -> list[Child]:
    return [zygote.start(command, folder, RANK=r, WORLD_SIZE=world) for r in range(world)]


def kill(child: Child, out: Path, rng: random.Random) -> Counter[str]:
    """Kill at a random moment after a random one of three events; the phase, if that ended it."""
    events = (lambda: True, lambda: phase_of(out) != BEFORE, lambda: any(out.glob("staging/*")))
    wait_for, deadline = rng.choice(events), time.monotonic() + 5
    while not wait_for() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.4))
    phase = phase_of(out)
    child.signal(signal.SIGKILL)
    code = child.wait()
    assert code in (0, -signal.SIGKILL), child.text()
    return Counter([phase] if code else [])


def phase_of(out: Path) -> str:
    if list(out.parent.glob(f".creating-*.{out.name}")):
        return "while the cache was made"
    if not out.exists():
        return BEFORE
    return "while a shard was written" if any(out.glob("staging/*")) else "between two shards"


@pytest.mark.slow
def test_the_others_finish_what_a_killed_worker_began(zygote, words, undisturbed, tmp_path):
    out = tmp_path / "hs"
    first, *rest = workers(zygote, [*words, "--out", out], 3, tmp_path)
    until(lambda: shards(out) > 0)
    first.signal(signal.SIGKILL)
    first.wait()
    assert [child.wait() for child in rest] == [0, 0]
    assert digest(out) == undisturbed["bf16"]


# --- SIGTERM and Ctrl-C


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_cleanly_and_says_how_to_go_on(
    zygote, words, undisturbed, tmp_path, number, code
):
    out = tmp_path / "hs"
    child = zygote.start([*words, "--out", out], tmp_path)
    until(lambda: shards(out) > 1)
    child.signal(number)
    assert child.wait() == code, child.text()
    left, cache = shards(out), Cache.open(out)
    assert 2 <= left < cache.plan.shards
    told = f"stopped by {number.name}: {left} of {cache.plan.shards} shards are there and kept; run"
    assert told in child.text()
    assert leftovers(out) == []
    ended, text = zygote.run([*words, "--out", out], tmp_path)
    assert ended == 0, text
    assert digest(out) == undisturbed["bf16"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_there_is_a_cache_leaves_nothing(zygote, words, tmp_path, number, code):
    out = tmp_path / "run" / "hs"
    child = zygote.start([*words, "--out", out, "--encoding", "int8"], tmp_path)
    until(lambda: list(tmp_path.glob("run/.creating-*")))
    child.signal(number)
    assert child.wait() == code, child.text()
    assert "Traceback" not in child.text()
    assert list(out.parent.iterdir()) == []


# --- several workers


@pytest.mark.slow
def test_torchrun_starts_workers_that_share_the_shards(words, undisturbed, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "cli.py", *map(str, words), "--out", str(tmp_path / "hs")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert digest(tmp_path / "hs") == undisturbed["bf16"]
    for rank in range(2):
        line, *more = (x for x in ran.stdout.splitlines() if f"[rank {rank}/2]" in x)
        assert "shards written" in line
        assert len(more) == (1 if rank == 0 and " 0 shards written" not in line else 0)
    assert ran.stdout.count("plan: ") == 1


@pytest.mark.slow
def test_slurm_workers_that_start_at_once_make_one_cache(zygote, words, undisturbed, tmp_path):
    command = [*words, "--out", tmp_path / "hs", "--encoding", "int8"]
    started = [zygote.start(command, tmp_path, SLURM_PROCID=r, SLURM_NTASKS=3) for r in range(3)]
    assert [child.wait() for child in started] == [0, 0, 0]
    assert digest(tmp_path / "hs") == undisturbed["int8"]
    assert leftovers(tmp_path / "hs") == []
    quiet = started[1].text().strip().splitlines()
    assert [line[:10] for line in quiet] == ["[rank 1/3]"]


# --- the disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 400 KiB; the cache of these tests needs about three times that."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", folder)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_keeps_finished_shards_and_a_larger_one_lets_it_go_on(
    zygote, words, undisturbed, small_disk, tmp_path
):
    out = small_disk / "hs"
    code, text = zygote.run([*words, "--out", out], tmp_path)
    assert code == 2
    assert "the cache still needs" in flat(text)
    assert "--force to go on" in flat(text)
    assert list(small_disk.iterdir()) == []
    code, text = zygote.run([*words, "--out", out, "--force"], tmp_path)
    assert code == 1, text
    assert "going on because of --force" in text
    told = f"Error: {out}: the disk is full; free space and run the same command again: finished"
    assert told in text
    assert "Traceback" not in text
    cache = Cache.open(out)
    assert 0 < shards(out) < cache.plan.shards
    assert leftovers(out) == []
    present = set(range(cache.plan.shards)) - set(cache.missing())
    assert [p for k in present for p in cache.verify_shard(k)] == []
    mount("-o", "remount,size=4m", small_disk)
    code, text = zygote.run([*words, "--out", out], tmp_path)
    assert code == 0, text
    assert digest(out) == undisturbed["bf16"]


def test_a_read_only_disk_is_told_before_anything_else(zygote, words, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder)
    try:
        code, text = zygote.run([*words, "--out", folder / "hs"], tmp_path)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert code == 2
    assert f"{folder} is write protected; give another --out" in flat(text)


@pytest.mark.slow
def test_a_cache_that_became_read_only_is_told_and_a_complete_one_is_fine(zygote, words, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    out = folder / "hs"
    try:
        assert zygote.run([*words, "--out", out], tmp_path)[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        code, text = zygote.run([*words, "--out", out], tmp_path)
        assert code == 0, text
        assert "nothing to do" in text
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        subprocess.run(["rm", "-r", Cache.open(out).shard_path(1)], check=True)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        code, text = zygote.run([*words, "--out", out], tmp_path)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert code == 2, text
    assert f"{out} cannot be written (read-only file system)" in flat(text)
    assert "Traceback" not in text


# --- reading meanwhile


@pytest.mark.slow
def test_reading_while_another_process_writes_sees_whole_shards_only(
    zygote, words, undisturbed, tmp_path
):
    out = tmp_path / "hs"
    child = zygote.start([*words, "--out", out], tmp_path)
    until(lambda: shards(out) > 0)
    seen = []
    while not seen or Cache.open(out).missing():
        cache = Cache.open(out)
        rows = cache.rows("train")
        if rows:
            stream = RowStream(cache, rows, batch_rows=1, seed=0, device="cpu", verify="always")
            seen.append(len([next(stream) for _ in rows]))
            stream.close()
        newest = max(set(range(cache.plan.shards)) - set(cache.missing()))
        assert inspect_shard(cache.shard_path(newest)).problems == []
    assert child.wait() == 0, child.text()
    assert len(seen) > 1
    assert seen[0] < seen[-1]
    assert digest(out) == undisturbed["bf16"]
