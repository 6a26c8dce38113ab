"""Training on CUDA: nothing moves after the warm-up, and it computes what the CPU computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_cache.cache import Cache, load_frozen
from dflash_cache.encoding import decode
from dflash_train.build import build_drafter
from dflash_train.config import TrainConfig
from dflash_train.rows import TENSORS
from dflash_train.steady import Steady, SteadyError
from dflash_train.step import TrainStep
from dflash_train.stream import RowStream
from dflash_train.teacher_forced import TeacherForced
from dflash_train.trainer import train
from tests.tiny_cache import make_cache

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 2, "anchors": 32, "batch_rows": 2, "strict": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    folder = tmp_path_factory.mktemp("cache") / "c"
    return make_cache(
        folder, rows=16, S=320, T=3, D=256, vocab=512, document_length=150, embed_scale=0.1
    )


def config(cache: Cache, out: Path, **changes) -> TrainConfig:
    return TrainConfig(cache=cache.path, out=out, **{**SHAPE, "device": "cuda", **changes})


def quiet(_: str) -> None:
    """A report that nobody reads."""


def test_no_recompile_allocation_or_sync_in_thirty_strict_steps(cache: Cache, tmp_path: Path):
    settings = config(
        cache, tmp_path / "o", steps=60, log_every=5, eval_every=20, checkpoint_every=20
    )
    summary = train(settings, quiet)
    counts = summary.steady
    assert (counts.recompiles, counts.device_allocations, counts.syncs) == (0, 0, 0)
    assert counts.steps >= 30
    assert summary.skipped == 0
    lines = [json.loads(s) for s in (tmp_path / "o" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_no_recompile_with_sliding_layers_and_accumulation(cache: Cache, tmp_path: Path):
    settings = config(
        cache, tmp_path / "o", steps=40, accumulation=2, sliding_layers=1, sliding_window=64
    )
    counts = train(settings, quiet).steady
    assert (counts.recompiles, counts.device_allocations, counts.syncs) == (0, 0, 0)
    assert counts.steps >= 10


def first_loss(cache: Cache, device: str, precision: str) -> tuple[float, list[torch.Tensor]]:
    """Mean loss of the first batch and its gradients; the anchors are the same everywhere."""
    settings = config(cache, Path("unused"), device=device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    where = torch.device(device)
    frozen = load_frozen(cache.target_dir, where, dtype)
    step = TrainStep(build_drafter(settings, cache, frozen, where), frozen, settings, anchors=32)
    stream = RowStream(cache, cache.rows("train"), batch_rows=2, seed=0, device=device)
    batch = next(stream)
    made = step.prepare(batch)
    total, tally = step.forward(decode(batch.states), batch.position, *made)
    loss = total / tally[1]
    loss.backward()
    gradients = [p.grad.float().cpu() for p in step.drafter.parameters() if p.grad is not None]
    stream.close()
    return loss.item(), gradients


@pytest.mark.parametrize(
    ("precision", "loss_error", "error"), [("bf16", 1e-2, 5e-2), ("fp32", 1e-3, 1e-2)]
)
def test_loss_and_gradients_equal_those_of_the_cpu(
    cache: Cache, precision: str, loss_error: float, error: float
):
    """bf16 has 8 bits: 4e-3 a rounding, over two layers; fp32 on CUDA may use TF32 in flex."""
    expected, wanted = first_loss(cache, "cpu", "fp32")
    found, gradients = first_loss(cache, "cuda", precision)
    assert found == pytest.approx(expected, rel=loss_error)
    for mine, reference in zip(gradients, wanted, strict=True):
        assert (mine - reference).norm() <= error * reference.norm()


def test_resume_on_cuda_continues_the_curve(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "a", steps=6, checkpoint_every=3, warmup_steps=1)
    train(settings, quiet)
    half = replace(settings, out=tmp_path / "b", log_every=1)

    def stop(line: str) -> None:
        if line.startswith("step 5/6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(half, stop)
    train(replace(half, resume=True), quiet)
    name = "checkpoints/step-00000006/state.safetensors"
    straight, resumed = load_file(tmp_path / "a" / name), load_file(tmp_path / "b" / name)
    for key, value in straight.items():
        difference = (resumed[key] - value).norm()
        assert difference <= 1e-3 * value.norm() + 1e-12, key  # atomics add in any order


def test_the_stream_delivers_on_cuda_what_it_reads_on_the_cpu(cache: Cache):
    rows = cache.rows("train")
    streams = [RowStream(cache, rows, batch_rows=2, seed=3, device=d) for d in ("cpu", "cuda")]
    for stream in streams:
        stream.start()
    for _ in range(12):
        host, device = (next(stream) for stream in streams)
        torch.cuda._sleep(3_000_000)  # the copy of the batch after next must wait for this one
        for name in TENSORS:
            assert torch.equal(getattr(host, name), getattr(device, name).cpu())
    for stream in streams:
        stream.close()


def test_held_out_acceptance_on_cuda_is_near_that_of_the_cpu(cache: Cache, tmp_path: Path):
    summary = train(config(cache, tmp_path / "o", steps=200, lr=3e-3), quiet)
    assert summary.acceptance is not None
    settings = config(cache, tmp_path / "x", device="cpu", init_from=summary.drafter)
    cpu = torch.device("cpu")
    frozen = load_frozen(cache.target_dir, cpu, torch.float32)
    drafter = build_drafter(settings, cache, frozen, cpu)
    evaluation = TeacherForced(drafter, frozen, cache, cache.rows("heldout"), anchors=32)
    on_cpu = evaluation.run()
    evaluation.close()
    assert summary.acceptance.blocks == on_cpu.blocks
    assert summary.acceptance.tau_mean == pytest.approx(on_cpu.tau_mean, rel=0.03)


def test_a_new_allocation_after_the_warm_up_stops_a_strict_run():
    device = torch.device("cuda", 0)
    steady = Steady(device, strict=True)
    steady.settle()  # or memory that another test gave back would serve
    steady.arm()
    kept = []
    with pytest.raises(SteadyError, match=r"step 4 .*device allocation"), steady.step(4):
        kept.append(torch.empty(2**30, dtype=torch.uint8, device=device))
    steady.close()


def test_a_host_sync_after_the_warm_up_is_counted_or_stops_the_run():
    device = torch.device("cuda", 0)
    number = torch.ones((), device=device)
    counting, strict = Steady(device), Steady(device, strict=True)
    counting.arm()
    with counting.step(1):
        number.item()
    assert counting.counts.syncs == 1
    strict.arm()
    with pytest.raises(SteadyError, match="step 2 waited for the GPU"), strict.step(2):
        number.item()
    number.item()  # outside of a step it is allowed
    counting.close()
    strict.close()
