"""`dflash train --dry-run`: figures computed by hand on a tiny cache, and nothing written."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from dflash_cache.cache import Cache
from dflash_cache.geometry import Geometry
from dflash_train.config import TrainConfig
from dflash_train.dryrun import DryRun, dry_run, mean_context, ring_bytes
from tests.tiny_cache import make_cache

# T = 3 taps of D = 32, S = 64, V = 48; one layer, 4 query and 2 kv heads of 16, MLP of 40, K = 8.
SHAPE = {"layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 40}
FC, ATTENTION, MLP = 3 * 32 * 32, 32 * 64 + 2 * 32 * 32 + 64 * 32, 3 * 32 * 40
NORMS = 2 * 32 + 2 * 32 + 2 * 16  # of features and output, of the layer, of queries and keys
PARAMETERS = FC + ATTENTION + MLP + NORMS
STATES = 64 * 3 * 32 * 2  # bytes of a row


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return make_cache(tmp_path_factory.mktemp("cache") / "c", rows=12, T=3)


def config(cache: Cache, **changes) -> TrainConfig:
    asked = {"block_size": 8, "anchors": 6, "batch_rows": 2, "accumulation": 3, "device": "cpu"}
    return TrainConfig(cache=cache.path, out=Path("unused"), **{**SHAPE, **asked, **changes})


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(p), p.stat().st_mtime_ns) for p in folder.rglob("*")}


@pytest.fixture(scope="module")
def figures(cache: Cache) -> DryRun:
    return dry_run(config(cache, steps=10))


def test_the_parts_of_the_memory_are_those_computed_by_hand(figures: DryRun):
    assert figures.parameters == PARAMETERS
    slots, per_layer = 2 * 6 * 8, 4 * 32 + 3 * 64 + 4 * 32 + 3 * 40
    activations = slots * per_layer + 2 * 64 * (2 * 32 + 4 * 32)
    tokens = 64 * (4 + 1 + 4 + 4) + 8 + 8  # ids, mask, document, position; row and epoch
    supervised = 2 * 6 * 7
    assert figures.memory == {
        "fp32 masters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "AdamW's moments": 8 * PARAMETERS,
        "embedding and head": 48 * 32 * 4,  # tied, fp32 on the CPU
        "2 batches": 2 * 2 * (STATES + tokens),
        "activations (estimate)": 4 * activations,
        "loss chunk (estimate)": 2 * 4 * (supervised * 48 + supervised * 32),
    }
    assert figures.device_bytes is None


def test_the_schedule_and_the_bytes_of_a_step(figures: DryRun, cache: Cache):
    rows = len(cache.rows("train"))
    assert (figures.rows, figures.steps, figures.rows_per_step) == (rows, 10, 6)
    assert figures.tokens == 10 * 6 * 64
    assert figures.epochs == pytest.approx(60 / rows)
    assert figures.step_bytes == 6 * (STATES + 64 * 13)
    assert figures.disk_bytes_per_second > 0
    assert figures.disk_seconds == figures.step_bytes / figures.disk_bytes_per_second
    assert figures.least_seconds == 10 * figures.disk_seconds


def test_without_steps_the_epochs_give_them(cache: Cache):
    rows = len(cache.rows("train"))
    assert dry_run(config(cache, epochs=5)).steps == math.ceil(5 * rows / 6)


def test_the_pinned_ring_is_rounded_up_to_powers_of_two():
    geometry = Geometry(seq_len=100, rows_per_shard=4, taps=3, hidden=40, encoding="int8")
    # states 3 * 12,000; scales 3 * 1,200; ids, document, position 3 * 400; mask 300; ids, epochs 24
    exact = 36_000 + 3_600 + 3 * 1_200 + 300 + 2 * 24
    rounded = 65_536 + 4_096 + 3 * 2_048 + 512 + 2 * 32
    assert ring_bytes(geometry, 3, pinned=False) == 2 * exact
    assert ring_bytes(geometry, 3, pinned=True) == 2 * rounded


def test_encoded_states_are_held_decoded_too(tmp_path: Path):
    cache = make_cache(tmp_path / "c", rows=12, T=3, encoding="int8")
    memory = dry_run(config(cache)).memory
    assert memory["decoded states"] == 2 * 64 * 3 * 32 * 2


def test_the_arithmetic_is_that_of_the_meter_at_the_documents_mean_context(
    figures: DryRun, cache: Cache
):
    lengths = cache.plan.doc_length.tolist()
    context = sum(sum(range(n)) for n in lengths) / sum(lengths)
    assert mean_context(cache.plan) == pytest.approx(context)
    per_row = 64 * (4 * 3 * 32**2 + 12 * 32 * 32)
    blocks = 6 * 6 * 8 * 6 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 40)
    head = 6 * 6 * 7 * 4 * 48 * 32
    attention = 6 * 6 * 8 * 64 * (context + 8) * 14
    assert figures.step_flops == pytest.approx(6 * per_row + blocks + head + attention)


def test_the_command_prints_it_and_writes_nothing(cache: Cache, tmp_path: Path):
    before = files(cache.path)
    out = tmp_path / "run"
    asked = ["train", "--cache", cache.path, "--out", out, "--device", "cpu", "--dry-run"]
    shown = CliRunner().invoke(cli.main, [str(a) for a in asked])
    assert shown.exit_code == 0, shown.output
    for word in ("parameters", "fp32 masters", "(estimate)", "host memory of the ring", "disk:"):
        assert word in shown.output
    printed = CliRunner().invoke(cli.main, [str(a) for a in [*asked, "--json"]])
    content = json.loads(printed.stdout)
    assert content["memory_total"] == sum(content["memory"].values())
    assert content["least_seconds"] > 0
    assert not out.exists()
    assert files(cache.path) == before


def test_a_setting_that_does_not_fit_is_refused_as_in_the_run(cache: Cache):
    asked = ["train", "--cache", str(cache.path), "--out", "x", "--anchors", "65", "--dry-run"]
    result = CliRunner().invoke(cli.main, asked)
    assert result.exit_code == 2
    assert "anchors is 65, but a row has 64 tokens" in result.output
