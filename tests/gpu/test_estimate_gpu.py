"""On CUDA: the timed batch runs for every encoding, and the run that follows is the one told."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_cache.cache import Cache
from dflash_cache.extract import ExtractConfig, dry_run, extract
from tests.helpers import tiny_tokenizer
from tests.tiny_models import tiny_hybrid

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    folder = tmp_path_factory.mktemp("m") / "hybrid"
    return tiny_hybrid(folder, tiny_tokenizer(), std=0.05, layers=2, **sizes)


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8", "bf16-lossless"])
def test_a_dry_run_times_a_batch_on_the_gpu_and_writes_nothing(model, tmp_path, encoding):
    rng, data = np.random.default_rng(0), tmp_path / "corpus.jsonl"
    lines = ({"input_ids": rng.integers(5, 300, n).tolist(), "loss_mask": [1] * n}
             for n in rng.integers(20, 256, 30).tolist())  # fmt: skip
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = ExtractConfig(
        str(model), data, tmp_path / "hs", taps=(0, 1), seq_len=256, batch_rows=4, device="cuda",
        encoding=encoding,
    )  # fmt: skip
    told = dry_run(config, lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert told.seconds > 0
    summary = extract(config, lambda _: None)
    assert (summary.tokens, summary.rows) == (told.missing_tokens, told.rows)
    assert Cache.open(config.out).missing() == []
