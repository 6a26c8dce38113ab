"""Two ranks train what one process trains, end together, and tell one sentence."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_cache.cache import Cache
from dflash_cache.errors import UsageError
from dflash_train.ranks import Ranks
from dflash_train.stream import RowStream
from tests.tiny_cache import make_cache
from tests.zygote import ROOT, Child, Zygote, until

SMALL = ("--layers", 1, "--block-size", 8, "--anchors", 6, "--device", "cpu", "--strict")
RUN = (*SMALL, "--accumulation", 2, "--warmup-steps", 1, "--log-every", 1, "--lr", 3e-3)
STEPS = 20


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as server:
        yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def start(zygote: Zygote, folder: Path, words: tuple, world: int = 2) -> list[Child]:
    """`dflash train` in `world` processes that know of each other as torchrun tells it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world}
    return [
        zygote.start(["train", *words], folder, RANK=r, LOCAL_RANK=r, **place) for r in range(world)
    ]


def codes(children: list[Child]) -> list[int]:
    return [child.wait() for child in children]


def words_for(cache: Cache, out: Path, *more: object) -> tuple:
    return ("--cache", cache.path, "--out", out, "--steps", STEPS, *RUN, *more)


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def state(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def alone(zygote: Zygote, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process; its checkpoints after steps 1, 10 and 20 are kept."""
    return _undisturbed(zygote, cache, tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def pair(zygote: Zygote, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of two ranks."""
    return _undisturbed(zygote, cache, tmp_path_factory.mktemp("pair"), 2)


def _undisturbed(zygote: Zygote, cache: Cache, folder: Path, world: int) -> Path:
    words = words_for(cache, folder / "o", "--checkpoint-every", 10, "--keep-last", 9)
    children = start(zygote, folder, words, world)
    assert codes(children) == [0] * world, [child.text() for child in children]
    assert [bool(child.text()) for child in children] == [rank == 0 for rank in range(world)]
    return folder / "o"


@pytest.mark.slow
def test_gradient_and_weights_of_two_ranks_equal_one_process_with_the_joint_batch(alone, pair):
    """After one step AdamW's mean is the clipped gradient, times 1 - beta1."""
    for step in (1, STEPS):
        one, two = state(alone, step), state(pair, step)
        assert one.keys() == two.keys()
        for name in one:
            scale = max(one[name].float().abs().max().item(), 1e-30)
            assert (one[name] - two[name]).abs().max().item() <= 1e-6 * scale, (step, name)


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(alone, pair):
    one, two = losses(alone), losses(pair)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-6)
    assert one[STEPS] < one[1]


@pytest.mark.slow
def test_kill_9_and_resume_repeat_the_curve_on_the_same_ranks_and_go_on_alone(
    zygote, cache, alone, pair, tmp_path
):
    out = tmp_path / "o"
    words = words_for(cache, out, "--checkpoint-every", 5, "--keep-last", 9)
    children = start(zygote, tmp_path, words)
    until(lambda: (out / "checkpoints" / "step-00000010").exists())
    for child in children:
        child.signal(signal.SIGKILL)
    assert codes(children) == [-9, -9]
    again = tmp_path / "alone"
    shutil.copytree(out, again)

    assert codes(start(zygote, tmp_path, (*words, "--resume"))) == [0, 0]
    assert same_bits(state(out, STEPS), state(pair, STEPS))
    assert losses(out) == losses(pair)

    words = words_for(cache, again, "--checkpoint-every", 5, "--keep-last", 9, "--resume")
    assert codes(start(zygote, tmp_path, words, world=1)) == [0]
    assert list(losses(again).values()) == pytest.approx(list(losses(alone).values()), rel=1e-6)


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_once_and_ends_all_with_143(zygote, cache, pair, tmp_path):
    out = tmp_path / "o"
    words = words_for(cache, out)
    children = start(zygote, tmp_path, words)
    until(lambda: "step  3/20" in children[0].text())
    children[1].signal(signal.SIGTERM)
    assert codes(children) == [143, 143]
    told = children[0].text()
    saved = re.search(r"stopped at step (\d+) of 20 .*--resume continues there", told)
    assert saved, told
    assert f"SIGTERM: saving after step {saved[1]}" in told
    assert children[1].text() == ""
    assert codes(start(zygote, tmp_path, (*words, "--resume"))) == [0, 0]
    assert same_bits(state(out, STEPS), state(pair, STEPS))


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_one_sentence(zygote, cache, tmp_path):
    copy = tmp_path / "c"
    shutil.copytree(cache.path, copy)
    damaged = Cache.open(copy)
    shard, inside = damaged.locate(damaged.rows("train")[3])
    chunk = shard.path / "states" / f"c.{inside}.0.0.0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    children = start(zygote, tmp_path, words_for(damaged, tmp_path / "o"))
    assert codes(children) == [1, 1]
    text = "".join(child.text() for child in children)
    assert text.count("Error:") == 1, text
    assert "is damaged" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_numbers_that_are_not_finite_skip_the_step_on_all_ranks(zygote, cache, tmp_path):
    copy = tmp_path / "c"
    shutil.copytree(cache.path, copy)
    poisoned = Cache.open(copy)
    row = poisoned.rows("train")[3]
    shard, inside = poisoned.locate(row)
    chunk = shard.path / "states" / f"c.{inside}.0.0.0"
    chunk.write_bytes(b"\xc0\x7f" * (chunk.stat().st_size // 2))  # bf16 NaN
    for name, world in (("one", 1), ("two", 2)):
        words = words_for(poisoned, tmp_path / name, "--verify", "off")
        assert codes(start(zygote, tmp_path, words, world)) == [0] * world
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [step for step in one if one[step] is None] == [
        step for step in two if two[step] is None
    ]
    assert None in two.values()
    finite = [step for step in one if one[step] is not None]
    assert [two[s] for s in finite] == pytest.approx([one[s] for s in finite], rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_with_a_sentence(zygote, cache, tmp_path):
    children = start(zygote, tmp_path, words_for(cache, tmp_path / "o", "--steps", 100_000))
    until(lambda: "step      3/" in children[0].text())
    children[1].signal(signal.SIGKILL)
    assert codes(children) == [1, -9]
    told = children[0].text()
    assert "rank 0 lost another rank" in told
    assert "--resume goes on from the last checkpoint" in told.replace("\n", " ")
    assert "Traceback" not in told


@pytest.mark.slow
def test_what_does_not_divide_over_the_ranks_is_refused_once(zygote, cache, tmp_path):
    children = start(zygote, tmp_path, words_for(cache, tmp_path / "o", "--accumulation", 3))
    assert sorted(codes(children)) == [1, 2]
    text = "".join(child.text() for child in children)
    assert text.count("accumulation is 3") == text.count("give a multiple of 2") == 1, text
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_torchrun_starts_a_run_and_one_rank_talks(cache, tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "cli"]
    words = [*command, "train", *words_for(cache, tmp_path / "o", "--steps", 3, "--json")]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, env=quiet
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rank"], summary["world"], summary["step"]) == (0, 2, 3)
    assert summary["steady_line"].endswith("all 2 ranks together")
    assert done.stderr.count("on 2 ranks, 1 x 1 rows each") == 1


def test_the_ranks_rows_together_are_those_of_one_process(cache: Cache):
    def rows(count: int, rank: int = 0, world: int = 1) -> list[tuple[int, ...]]:
        kind = {"batch_rows": 2, "seed": 3, "device": "cpu", "rank": rank, "world": world}
        stream = RowStream(cache, cache.rows("train"), **kind)
        taken = [next(stream).rows for _ in range(count)]
        stream.close()
        return taken

    split = zip(rows(6, 0, 2), rows(6, 1, 2), strict=True)
    assert [batch for both in split for batch in both] == rows(12)


def test_alone_everything_stays_as_it_is():
    ranks, value = Ranks(), torch.tensor([1.0, 2.0])
    with ranks:
        ranks.sum_([value])
        ranks.from_first_([value])
        ranks.check_same("anything", "ab")
        assert (ranks.first, ranks.share(5), ranks.largest(3), ranks.total([1, 2])) == (
            True, 5, 3, [1, 2]
        )  # fmt: skip
        assert ranks.all_of(value.long()) == value.tolist() == [1, 2]


def test_half_of_torchruns_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="RANK is not set: start the ranks with torchrun"):
        Ranks.join(torch.device("cpu"), "cpu")
