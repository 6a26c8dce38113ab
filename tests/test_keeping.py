"""The best checkpoint is kept beside the last ones, and its drafter is the run's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_cache.cache import Cache
from dflash_train.checkpoint import best_checkpoint, checkpoints
from dflash_train.config import TrainConfig
from dflash_train.teacher_forced import Acceptance, TeacherForced
from dflash_train.trainer import train
from tests.tiny_cache import make_cache

SCRIPT = [2.0, 5.0, 3.0, 4.0]  # held-out tau after steps 2, 4, 6, 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def config(cache: Cache, out: Path, **changes) -> TrainConfig:
    small = {"layers": 1, "block_size": 8, "anchors": 6, "device": "cpu", "warmup_steps": 1}
    often = {"steps": 8, "eval_every": 2, "checkpoint_every": 2}
    return TrainConfig(cache=cache.path, out=out, **{**small, **often, **changes})


def measure(monkeypatch: pytest.MonkeyPatch, script: list[float]) -> None:
    """Evaluations find these taus, one after the other."""
    taus: Iterator[float] = iter(script)

    def run(self: TeacherForced) -> Acceptance:
        return Acceptance(1, 1, 1, 0, 1.0, 1.0, next(taus), [0.5] * 7, [0.5] * 7)

    monkeypatch.setattr(TeacherForced, "run", run)


def steps_kept(out: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in checkpoints(out)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def holds(out: Path, step: int) -> bool:
    """Whether `OUT/drafter` is that of the checkpoint of this step."""
    drafter, then = weights(out / "drafter"), weights(out / "checkpoints" / f"step-{step:08d}")
    return all(torch.equal(drafter[name], then[name]) for name in then)


def test_the_best_is_kept_and_is_what_the_run_gives(cache, tmp_path, monkeypatch):
    measure(monkeypatch, SCRIPT)
    told: list[str] = []
    summary = train(config(cache, tmp_path / "o"), told.append)
    assert steps_kept(tmp_path / "o") == [4, 6, 8]
    assert summary.drafter_step == 4
    assert holds(tmp_path / "o", 4)
    assert not holds(tmp_path / "o", 8)
    assert "step 4's, with the best held-out tau (--no-keep-best takes the last" in told[-1]
    best = best_checkpoint(tmp_path / "o")
    assert best is not None
    assert (best.step, best.tau) == (4, 5.0)


def test_without_keep_best_the_last_one_is_the_runs(cache, tmp_path, monkeypatch):
    measure(monkeypatch, SCRIPT)
    summary = train(config(cache, tmp_path / "o", keep_best=False), lambda _: None)
    assert steps_kept(tmp_path / "o") == [6, 8]
    assert summary.drafter_step == 8
    assert holds(tmp_path / "o", 8)


def test_a_better_evaluation_saves_though_no_checkpoint_is_due(cache, tmp_path, monkeypatch):
    measure(monkeypatch, SCRIPT)
    train(config(cache, tmp_path / "o", checkpoint_every=0, keep_last=1), lambda _: None)
    assert steps_kept(tmp_path / "o") == [4, 8]
    assert holds(tmp_path / "o", 4)


def test_a_checkpoint_of_the_warm_up_learns_the_tau_of_its_step(cache, tmp_path, monkeypatch):
    measure(monkeypatch, [7.0, 1.0, 1.0, 1.0])
    settings = config(cache, tmp_path / "o", warmup_steps=2, checkpoint_every=0)
    assert train(settings, lambda _: None).drafter_step == 2


def test_of_equals_the_first_is_the_best_and_a_tau_that_is_no_number_counts_for_nothing(
    cache, tmp_path, monkeypatch
):
    measure(monkeypatch, [float("nan"), 3.0, 3.0, float("nan")])
    assert train(config(cache, tmp_path / "o"), lambda _: None).drafter_step == 4


def test_a_resumed_run_still_knows_its_best(cache, tmp_path, monkeypatch):
    settings = config(cache, tmp_path / "o", log_every=1)

    def until_seven(line: str) -> None:
        if line.startswith("step 7/8"):
            raise KeyboardInterrupt

    measure(monkeypatch, SCRIPT)
    with pytest.raises(KeyboardInterrupt):
        train(settings, until_seven)
    measure(monkeypatch, SCRIPT[3:])
    summary = train(replace(settings, resume=True), lambda _: None)
    assert summary.drafter_step == 4
    assert holds(tmp_path / "o", 4)


def test_no_held_out_rows_leave_the_last_drafter(tmp_path):
    bare = make_cache(tmp_path / "c", rows=6, heldout=0.0)
    assert train(config(bare, tmp_path / "o", steps=3), lambda _: None).drafter_step == 3
