"""On CUDA: codes are those of the CPU, compiled layers give the states of the uncompiled ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache
from dflash_cache.encoding import Codec
from dflash_cache.extract import ExtractConfig, extract
from dflash_cache.selfcheck import prove, prove_compiled
from dflash_cache.target import Target
from dflash_train.stream import RowStream
from tests.helpers import tiny_tokenizer
from tests.tiny_cache import make_cache
from tests.tiny_models import tiny_hybrid

pytestmark = pytest.mark.gpu

SEQ_LEN = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    folder = tmp_path_factory.mktemp("m") / "hybrid"
    return tiny_hybrid(folder, tiny_tokenizer(), std=0.05, layers=2, **sizes)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("d") / "corpus.jsonl"
    lines = (
        {"input_ids": rng.integers(5, 300, n).tolist(), "loss_mask": [1] * n}
        for n in rng.integers(20, 256, 40).tolist()
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_gpu_encodes_and_decodes_as_the_cpu_up_to_the_last_code(name):
    make = torch.Generator().manual_seed(0)
    states = torch.randn(2, 100, 3, 256, generator=make) * torch.logspace(-2, 1, 256)
    states[:, 0, :, 7] = 25_000.0
    states = states.bfloat16()
    scale = states.float().square().mean((0, 1)).sqrt()  # [T, D]
    here, there = Codec(name, scale), Codec(name, scale, "cuda")
    want, have = here.encode(states), there.encode(states.cuda())
    torch.testing.assert_close(have.scales.cpu(), want.scales, rtol=1e-6, atol=0)
    assert (have.states.cpu() == want.states).float().mean() > 0.999
    back, again = here.decode(*want).float(), there.decode(*have).cpu().float()
    size = states.float().norm(dim=-1)
    assert ((back - again).norm(dim=-1) / size).max() < 0.02
    same = there.decode(want.states.cuda(), want.scales.cuda()).cpu()
    torch.testing.assert_close(same.float(), back, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_run_the_fused_kernels_and_give_the_same_states(model, dtype):
    target = Target.load(str(model), taps=[0, 1], device="cuda", dtype=dtype)
    prove(target)
    ids = torch.randint(0, 300, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    document, position = torch.ones(2, SEQ_LEN, dtype=torch.int32), torch.arange(SEQ_LEN)[None]
    document[:, 100:] = 2
    position = torch.cat([position[:, :100], position[:, :156]], dim=1).repeat(2, 1)
    assert "layers compiled" in prove_compiled(target, (ids, document, position))
    with torch.compiler.set_stance("fail_on_recompile"):
        document[:, 200:] = 3
        target.run_rows(ids, document, position)
    used = target.last_runner.implementations(0, "delta")
    assert used == ["fla.chunk_gated_delta_rule"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        target.run_rows(ids, document, position)
    names = " ".join(event.key for event in profile.key_averages())
    assert "chunk_fwd_kernel" in names or "chunk_gated_delta_rule" in names
    assert "causal_conv1d" in names


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8", "bf16-lossless"])
def test_an_extraction_with_compiled_layers_stores_the_states_of_an_eager_one(
    model, data, tmp_path, encoding
):
    caches = []
    for compile in (False, True):
        config = ExtractConfig(
            str(model),
            data,
            tmp_path / str(compile),
            taps=(0, 1),
            seq_len=SEQ_LEN,
            rows_per_shard=6,
            batch_rows=4,
            device="cuda",
            encoding=encoding,
            compile=compile,
        )
        summary = extract(config, lambda _: None)
        assert 0 < summary.forward_share <= 1
        caches.append(Cache.open(config.out))
    assert [p for k in range(caches[1].plan.shards) for p in caches[1].verify_shard(k)] == []
    have, want = (
        torch.stack([cache.decoded_row(row) for row in range(cache.plan.rows)]).float()
        for cache in caches
    )
    assert (have - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("encoding", ["bf16", "int8", "fp8", "bf16-lossless"])
def test_the_stream_decodes_on_the_gpu_what_the_cache_holds(tmp_path, encoding):
    cache = make_cache(tmp_path / "c", D=64, encoding=encoding)
    codec = cache.codec("cuda")
    stream = RowStream(cache, cache.rows("train"), batch_rows=2, seed=0, device="cuda")
    batch = next(stream)
    states = codec.decode(batch.states, batch.scales).cpu()
    for i, row in enumerate(batch.rows):
        want = cache.decoded_row(row).float()
        torch.testing.assert_close(states[i].float(), want, rtol=2**-7, atol=1e-6)
    stream.close()
