"""A whole run on a tiny cache: it learns, says what it did, stops and resumes without a trace."""

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_cache.cache import Cache
from dflash_cache.errors import DataError, UsageError
from dflash_train.build import first_unused_token
from dflash_train.checkpoint import load_drafter
from dflash_train.config import TrainConfig
from dflash_train.meter import step_flops
from dflash_train.stream import RowOrder
from dflash_train.trainer import train
from tests.tiny_cache import make_cache

SMALL = {"layers": 1, "block_size": 8, "anchors": 6, "device": "cpu", "strict": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def config(cache: Cache, out: Path, **changes) -> TrainConfig:
    return TrainConfig(cache=cache.path, out=out, **{**SMALL, **changes})


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def masters(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def quiet(_: str) -> None:
    """A report that nobody reads."""


def test_loss_falls_and_tau_rises_on_a_learnable_cache(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "o", steps=160, batch_rows=2, lr=3e-3, eval_every=20)
    summary = train(settings, quiet)
    losses = [line["loss"] for line in metrics(tmp_path / "o") if line["kind"] == "train"]
    assert losses[-1] < losses[0] / 4
    evals = [line["tau_walk"] for line in metrics(tmp_path / "o") if line["kind"] == "eval"]
    assert evals[-1] > evals[0]
    assert summary.acceptance is not None
    assert summary.acceptance.tau_walk == evals[-1]


def test_the_summary_and_the_metrics_tell_the_run(cache: Cache, tmp_path: Path):
    told: list[str] = []
    summary = train(config(cache, tmp_path / "o", steps=9, log_every=2), told.append)
    lines = metrics(tmp_path / "o")
    kinds = [line["kind"] for line in lines]
    assert kinds == ["start", *["train"] * 5, "eval", "summary"]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6, 8, 9]
    wanted = {"step", "loss", "tau", "lr", "tokens_per_s", "mfu", "data_wait", "memory_gib"}
    assert wanted | {"eta_s", "grad_norm", "skipped", "accuracy"} <= set(lines[1])
    assert lines[0]["config"]["anchors"] == 6
    assert lines[-1]["steady"] == {
        "steps": 2, "recompiles": 0, "device_allocations": 0, "syncs": 0
    }  # fmt: skip
    log = next(line for line in told if line.startswith("step 8/9"))
    parts = [part.split()[0] for part in log.split(" | ")]
    assert parts[:4] == ["step", "loss", "tau", "lr"]
    assert parts[5:] == ["data", "memory", "ETA"]
    assert "after warm-up: 0 recompiles in 2 steps" in summary.steady_line
    assert summary.steady_line in told
    assert any("per supervised token" in line for line in told)
    assert summary.tokens == 9 * 64


def test_the_drafter_of_a_run_loads_as_z_labs(cache: Cache, tmp_path: Path):
    summary = train(config(cache, tmp_path / "o", steps=2), quiet)
    assert summary.drafter == tmp_path / "o" / "drafter"
    drafter = load_drafter(summary.drafter, "cpu", torch.float32)
    assert drafter.config.target_layer_ids == (1, 2, 3)
    assert drafter.config.mask_token_id == 46  # the first id that the tokenizer lacks


def test_resumed_run_is_bit_equal_to_an_unbroken_one(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "a", steps=6, warmup_steps=1, accumulation=2, epochs=1)
    train(settings, quiet)
    broken = replace(settings, out=tmp_path / "b", checkpoint_every=3, log_every=1)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(broken, _raise_at("step 5/6"))
    summary = train(replace(broken, resume=True), told.append)
    assert any("at step 3" in line for line in told)
    straight, resumed = masters(tmp_path / "a", 6), masters(tmp_path / "b", 6)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert summary.step == 6


def _raise_at(start: str):
    def report(line: str) -> None:
        if line.startswith(start):
            raise KeyboardInterrupt

    return report


def test_a_resumed_run_continues_the_metrics_without_repeating(cache: Cache, tmp_path: Path):
    settings = config(
        cache, tmp_path / "o", steps=6, checkpoint_every=3, log_every=1, warmup_steps=1
    )
    with pytest.raises(KeyboardInterrupt):
        train(settings, _raise_at("step 5/6"))
    train(replace(settings, resume=True), quiet)
    steps = [line["step"] for line in metrics(tmp_path / "o") if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_a_sentence(
    cache: Cache, tmp_path: Path, number: signal.Signals
):
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        if line.startswith("step  4/50"):
            os.kill(os.getpid(), number)

    summary = train(config(cache, tmp_path / "o", steps=50, log_every=1), report)
    assert summary.interrupted
    assert summary.drafter is None
    assert summary.checkpoint.name in ("step-00000004", "step-00000005")
    assert "on request; saved" in told[-1]
    assert "--resume continues there" in told[-1]
    assert summary.exit_code == 128 + number
    assert signal.getsignal(number) is not None


def test_an_existing_run_is_not_overwritten(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "o", steps=1)
    train(settings, quiet)
    with pytest.raises(UsageError, match=r"holds a run already .*give --resume"):
        train(settings, quiet)


def test_resuming_a_finished_run_changes_nothing(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "o", steps=2)
    train(settings, quiet)
    before = masters(tmp_path / "o", 2)
    summary = train(replace(settings, resume=True), quiet)
    after = masters(tmp_path / "o", 2)
    assert summary.step == 2
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_held_out_rows_the_run_says_so_once(tmp_path: Path):
    bare = make_cache(tmp_path / "c", rows=6, heldout=0.0)
    told: list[str] = []
    summary = train(config(bare, tmp_path / "o", steps=2), told.append)
    assert sum("no held-out rows" in line for line in told) == 1
    assert summary.acceptance is None


def test_ten_steps_that_are_not_finite_stop_the_run_with_their_rows(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=6)
    for row in cache.rows("train"):
        shard, inside = cache.locate(row)
        chunk = shard.path / "states" / f"c.{inside}.0.0.0"
        chunk.write_bytes(b"\xc0\x7f" * (chunk.stat().st_size // 2))  # bf16 NaN
    settings = config(cache, tmp_path / "o", steps=20, verify="off")
    with pytest.raises(DataError, match=r"10 steps in a row up to step 10 ") as failed:
        train(settings, quiet)
    named = re.search(r"the last 10 on rows (\[.*?\]) of the cache", str(failed.value))
    order = RowOrder(cache.rows("train"), settings.seed)
    assert named
    assert json.loads(named[1]) == sorted({order.at(position)[0] for position in range(10)})


def test_a_damaged_row_reaches_the_user_through_the_loader(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=8)
    for row in cache.rows("train"):
        shard, inside = cache.locate(row)
        chunk = shard.path / "states" / f"c.{inside}.0.0.0"
        chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(DataError, match=r"shard 00000\d\.zarr, row \d+ .* is damaged"):
        train(config(cache, tmp_path / "o", steps=20), quiet)


def test_weights_start_from_another_drafter(cache: Cache, tmp_path: Path):
    first = train(config(cache, tmp_path / "a", steps=3), quiet)
    settings = config(cache, tmp_path / "b", steps=1, lr=1e-12, init_from=first.drafter)
    train(settings, quiet)
    old, new = (load_file(tmp_path / d / "drafter" / "model.safetensors") for d in "ab")
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_drafter_of_another_shape_is_no_start(cache: Cache, tmp_path: Path):
    first = train(config(cache, tmp_path / "a", steps=1), quiet)
    settings = config(cache, tmp_path / "b", steps=1, layers=2, init_from=first.drafter)
    with pytest.raises(DataError, match="num_hidden_layers 1, but this run needs 2"):
        train(settings, quiet)


def test_a_sliding_layer_trains_and_is_written_down(cache: Cache, tmp_path: Path):
    settings = config(cache, tmp_path / "o", steps=1, layers=2, sliding_layers=1, sliding_window=12)
    summary = train(settings, quiet)
    assert summary.drafter is not None
    written = json.loads((summary.drafter / "config.json").read_text())
    assert written["layer_types"] == ["sliding_attention", "full_attention"]
    assert (written["sliding_window"], written["use_sliding_window"]) == (12, True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"anchors": 65}, "anchors is 65, but a row has 64 tokens"),
        ({"device": "cuda"}, "torch sees no CUDA GPU here"),
        ({"resume": True}, "no checkpoint to resume"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    cache: Cache, tmp_path: Path, changes: dict, told: str
):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError, match=told):
        train(config(cache, tmp_path / "o", steps=1, **changes), quiet)


def test_a_tokenizer_that_fills_the_embedding_asks_for_the_mask_token(tmp_path: Path):
    content = {"model": {"vocab": {"a": 0, "b": 2}}, "added_tokens": [{"id": 1}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert first_unused_token(tmp_path, 4) == 3
    with pytest.raises(UsageError, match="uses all 3 rows of the embedding: give --mask-token-id"):
        first_unused_token(tmp_path, 3)


def test_flops_of_the_published_8b_step_are_those_counted_by_hand(cache: Cache, tmp_path: Path):
    """73.8 TFLOP at S 4096, 512 anchors, Qwen3-8B's drafter."""
    first = train(config(cache, tmp_path / "o", steps=1), quiet)
    assert first.drafter is not None
    shape = replace(
        load_drafter(first.drafter, "cpu", torch.float32).config,
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=5, vocab_size=151936,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, block_size=16,
        target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36,
        layer_types=("full_attention",) * 5,
    )  # fmt: skip
    flops = step_flops(shape, rows=1, seq_len=4096, anchors=512, context=2048)
    assert flops == pytest.approx(73.8e12, rel=0.01)


@pytest.mark.slow
def test_the_trainer_imports_nothing_of_the_target(tmp_path: Path):
    """In a fresh interpreter: what `train` needs is the cache alone."""
    import subprocess

    code = (
        "import sys, dflash_train.trainer; "
        "bad = {'target', 'kernels', 'extract', 'decoding'}; "
        "print([m for m in sys.modules if m.startswith('dflash_cache.') and m[13:] in bad"
        " or m == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_edited_manifest_and_a_damaged_target_are_refused(cache: Cache, tmp_path: Path):
    for name, what in (
        ("manifest.json", "manifest_digest"),
        ("target/frozen.safetensors", "sha256"),
    ):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(cache.path, copy)
        data = bytearray((copy / name).read_bytes())
        if name == "manifest.json":
            content = json.loads(data)
            content["taps"] = [tap + 1 for tap in content["taps"]]
            data = bytearray(json.dumps(content).encode())
        else:
            data[-5] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(DataError, match=what):
            train(config(Cache.open(copy), tmp_path / "out", steps=2), quiet)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_cache_is_named_as_such(cache: Cache, tmp_path: Path):
    copy = tmp_path / "part"
    shutil.copytree(cache.path, copy)
    shards = sorted((copy / "shards").iterdir())
    shutil.rmtree(shards[-1])
    told: list[str] = []
    train(config(Cache.open(copy), tmp_path / "o", steps=2), told.append)
    assert told[0].startswith(f"the cache is unfinished: {len(shards) - 1} of {len(shards)} shards")


def test_a_run_whose_steps_were_all_skipped_fails_and_leaves_no_drafter(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "dflash_train.step.Codec.decode",
        lambda self, bits, scales: bits.view(torch.bfloat16) * float("nan"),
    )
    with pytest.raises(DataError, match="all 3 steps"):
        train(config(cache, tmp_path / "o", steps=3), quiet)
    assert not (tmp_path / "o" / "drafter").exists()


def test_the_first_log_line_after_the_warm_up_tells_a_real_rate(cache: Cache, tmp_path: Path):
    train(config(cache, tmp_path / "o", steps=3, log_every=1), quiet)
    rates = [line["tokens_per_s"] for line in metrics(tmp_path / "o") if line["kind"] == "train"]
    # A step of 64 tokens takes longer than a tenth of a millisecond on any machine.
    assert all(0 < rate < 64 / 1e-4 for rate in rates)


@pytest.mark.parametrize("out", ["afile", "afile/run"])
def test_an_out_that_cannot_be_a_folder_is_a_usage_error(cache: Cache, tmp_path: Path, out: str):
    (tmp_path / "afile").write_text("x")
    with pytest.raises(UsageError, match="is a file; give another --out"):
        train(config(cache, tmp_path / out, steps=2), quiet)
