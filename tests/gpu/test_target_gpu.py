"""On CUDA: fused kernels against the reference, packed against alone, decoding, rolling back."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_cache.cache import Cache
from dflash_cache.decoding import SHORT, TargetDecoder
from dflash_cache.doctor import examine
from dflash_cache.errors import UsageError
from dflash_cache.extract import ExtractConfig, extract
from dflash_cache.fused import import_fused, load_fused
from dflash_cache.kernels import REFERENCE
from dflash_cache.packed import PackedRows
from dflash_cache.selfcheck import prove
from dflash_cache.target import Target
from tests.helpers import tiny_tokenizer
from tests.tiny_models import VOCAB, kimi_config, save_model, tiny_dense, tiny_hybrid

pytestmark = pytest.mark.gpu
LENGTHS, SEQ_LEN = (61, 3, 130, 40), 256
DTYPES = [torch.float32, torch.bfloat16]
LIMITS = {torch.float32: 5e-3, torch.bfloat16: 3e-2}
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    # Weights small enough that bf16 noise does not grow from layer to layer.
    return {
        "hybrid": tiny_hybrid(root / "hybrid", tiny_tokenizer(), std=0.05, **sizes),
        "dense": tiny_dense(root / "dense", "qwen3", tiny_tokenizer(), std=0.05),
    }


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def hybrid(request, folders) -> Target:
    return Target.load(
        str(folders["hybrid"]), taps=range(6), device="cuda", dtype=request.param, full=True
    )


def packed_row(rows: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, SEQ_LEN), generator=generator)
    document, position = torch.zeros(2, rows, SEQ_LEN, dtype=torch.long)
    start = 0
    for number, length in enumerate(LENGTHS, start=1):
        document[:, start : start + length] = number
        position[:, start : start + length] = torch.arange(length)
        start += length
    return ids, document, position


def spans():
    ends = np.cumsum(LENGTHS).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def close(have: torch.Tensor, want: torch.Tensor, target: Target) -> None:
    """States [B, L, T, D]: relative error over all tokens, and of the worst token."""
    error = (have.float() - want.float()).square().sum(-1)  # [B, L, T]
    size = want.float().square().sum(-1)
    overall = float((error.sum((0, 1)) / size.sum((0, 1))).sqrt().max())
    worst = float((error / size).sqrt().max())
    limit = LIMITS[target.dtype]
    print(f"relative error {overall:.2e}, worst token {worst:.2e}, {target.dtype}")
    assert overall < limit
    assert worst < 3 * limit


def test_packed_fused_states_equal_the_reference_layer_by_layer(hybrid):
    ids, document, position = packed_row(rows=2)
    fused = hybrid.run_rows(ids, document, position)
    reference = hybrid.run_rows(ids, document, position, fused=False)
    real = sum(LENGTHS)
    for tap in range(6):
        one = slice(tap, tap + 1)
        close(fused[:, :real, one], reference[:, :real, one], hybrid)


def test_a_packed_document_equals_the_document_alone(hybrid):
    ids, document, position = packed_row()
    packed = hybrid.run_rows(ids, document, position)
    for span in spans():
        alone = hybrid.run_rows(ids[:, span], document[:, span], position[:, span])
        close(packed[:, span], alone, hybrid)


def test_a_token_of_another_document_changes_nothing(hybrid):
    ids, document, position = packed_row()
    before = hybrid.run_rows(ids, document, position)
    changed = ids.clone()
    changed[0, 60] = (changed[0, 60] + 1) % VOCAB
    after = hybrid.run_rows(changed, document, position)
    assert torch.equal(before[:, 61:234], after[:, 61:234])
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60], after[:, 60])


def test_every_layer_runs_fused_and_once(hybrid):
    hybrid.run_rows(*packed_row())
    runner = hybrid.last_runner
    assert runner is not None
    assert not [key for key in runner.counts if key[2] == REFERENCE]
    assert set(runner.counts.values()) == {1}
    linear = [i for i, kind in enumerate(hybrid.kinds) if kind == "linear_attention"]
    for index in linear:
        assert runner.implementations(index, "delta") == ["fla.chunk_gated_delta_rule"]
        assert runner.implementations(index, "conv") == [load_fused().conv_name]


def test_fused_kernels_are_really_launched(hybrid):
    hybrid.run_rows(*packed_row())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        hybrid.run_rows(*packed_row())
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "chunk_gated_delta_rule" in names or "chunk_fwd_kernel" in names, names
    assert "causal_conv1d" in names, names


def test_the_self_check_passes_and_says_how_far_off_it_was(hybrid):
    said = prove(hybrid)
    print(said)
    assert "fused = reference (checked, error" in said
    assert "packed = alone (checked, error" in said


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def kimi(request, tmp_path_factory) -> Target:
    sizes = {"linear_head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    folder = save_model(tmp_path_factory.mktemp("kimi") / "m", kimi_config(**sizes), std=0.05)
    return Target.load(str(folder), taps=range(4), device="cuda", dtype=request.param, full=True)


def test_kimi_delta_attention_runs_fused_and_passes_the_self_check(kimi):
    said = prove(kimi)
    print(said)
    assert said.startswith("kernels: fla.chunk_kda, ")
    assert "fused = reference (checked, error" in said
    kimi.run_rows(*packed_row())
    runner = kimi.last_runner
    assert runner is not None
    for index, kind in enumerate(kimi.kinds):
        if kind == "linear_attention":
            assert runner.implementations(index, "delta") == ["fla.chunk_kda"]


def test_packed_kimi_states_equal_those_of_the_reference(kimi):
    if kimi.dtype != torch.float32:
        pytest.skip("in half precision a token may choose another expert by a hair")
    ids, document, position = packed_row(rows=2)
    fused = kimi.run_rows(ids, document, position)
    reference = kimi.run_rows(ids, document, position, fused=False)
    real = sum(LENGTHS)
    close(fused[:, :real], reference[:, :real], kimi)


def test_a_rolled_back_kimi_state_is_that_of_a_fresh_prefill(kimi):
    if kimi.dtype != torch.float32:
        pytest.skip("in half precision a token may choose another expert by a hair")
    ids = packed_row()[0][0]
    decoder, fresh = TargetDecoder(kimi), TargetDecoder(kimi)
    decoder.prefill(ids[:70])
    decoder.verify(ids[70:86])
    decoder.rollback(7)
    fresh.prefill(ids[:77])
    close(decoder.verify(ids[220:225]).taps[None], fresh.verify(ids[220:225]).taps[None], kimi)


def test_without_fla_the_target_is_refused_and_with_allow_slow_it_runs_slowly(folders, monkeypatch):
    import_fused.cache_clear()
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    about = {"taps": [0, 3], "device": "cuda"}
    with pytest.raises(UsageError, match=r"pip install flash-linear-attention.*--allow-slow"):
        Target.load(str(folders["hybrid"]), **about)
    slow = Target.load(str(folders["hybrid"]), **about, allow_slow=True)
    said = prove(slow)
    assert said.startswith("kernels: SLOW torch reference on CUDA")
    assert "packed = alone (checked, error" in said
    import_fused.cache_clear()


@pytest.mark.parametrize("family", ["hybrid", "dense"])
def test_the_doctor_finds_this_machine_ready(folders, family):
    report = examine(str(folders[family]))
    assert report.problems == []
    assert all(layers.cuda is not None for layers in report.layers)
    assert report.gpus[0].name == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("window", [None, 16])
def test_attention_with_a_document_mask_equals_attention_per_document(window):
    document = packed_row()[1]
    rows = PackedRows(document, CUDA)
    q, k, v = (torch.randn(1, h, SEQ_LEN, 64, device=CUDA).bfloat16() for h in (8, 2, 2))
    one, other = rows.attend(q, k, v, None, window), rows.attend_masked(q, k, v, None, window)
    torch.testing.assert_close(one[:, :, :234], other[:, :, :234], atol=2e-2, rtol=2e-2)


def test_the_triton_convolution_respects_documents():
    from fla.modules.causal_conv1d import causal_conv1d

    from dflash_cache.fused import _triton_conv

    rows = PackedRows(packed_row(rows=2)[1], CUDA)
    x, weight = torch.randn(2, 64, SEQ_LEN, device=CUDA), torch.randn(64, 4, device=CUDA)
    have = _triton_conv(causal_conv1d)(x, weight, None, "silu", rows.document, rows.cu_seqlens)
    want = rows.conv(x, weight, None, "silu")
    real = (rows.document != 0)[:, None]
    torch.testing.assert_close(have * real, want, atol=1e-4, rtol=1e-4)


def greedy(decoder: TargetDecoder, prompt: torch.Tensor, n: int) -> list[int]:
    step, out = decoder.prefill(prompt), []
    while len(out) < n:
        out.append(int(step.logits[-1].argmax()))
        step = decoder.verify(torch.tensor(out[-1:]))
    return out


def test_verifying_the_targets_own_text_agrees_up_to_near_ties(hybrid):
    prompt = packed_row()[0][0, :50]
    text = greedy(TargetDecoder(hybrid), prompt, 48)
    decoder = TargetDecoder(hybrid)
    decoder.prefill(prompt)
    logits = torch.cat([decoder.verify(torch.tensor(text[i : i + 16])).logits for i in (0, 16, 32)])
    wanted = torch.tensor(text[1:], device=CUDA)
    top = logits[:-1].float().topk(2).values
    near_tie = top[:, 0] - logits[:-1].float().gather(1, wanted[:, None])[:, 0]
    assert (near_tie <= 0.02 * top[:, 0].abs().clamp_min(1)).all()


@pytest.mark.parametrize(("start", "block"), [(70, 16), (70, SHORT + 20), (SHORT + 10, 16)])
@pytest.mark.parametrize("keep", [0, 1, 2, 7, 16])
def test_a_rolled_back_state_is_that_of_a_fresh_prefill(hybrid, start, block, keep):
    ids = packed_row()[0][0]
    prompt, middle, after = ids[:start], ids[start : start + block], ids[220:225]
    decoder, fresh = TargetDecoder(hybrid), TargetDecoder(hybrid)
    decoder.prefill(prompt)
    decoder.verify(middle)
    decoder.rollback(keep)
    fresh.prefill(torch.cat([prompt, middle[:keep]]))
    have, want = decoder.verify(after), fresh.verify(after)
    close(have.taps[None], want.taps[None], hybrid)


def test_keeping_nothing_restores_the_very_same_state(hybrid):
    ids = packed_row()[0][0]
    decoder = TargetDecoder(hybrid)
    decoder.prefill(ids[:70])
    before = {i: (s.conv.clone(), s.state.clone()) for i, s in decoder._states.recurrent.items()}
    decoder.verify(ids[70:86])
    decoder.rollback(0)
    for index, (conv, state) in before.items():
        assert torch.equal(decoder._states.recurrent[index].conv, conv)
        assert torch.equal(decoder._states.recurrent[index].state, state)


@pytest.mark.parametrize("family", ["hybrid", "dense"])
def test_an_extraction_on_cuda_gives_the_states_of_the_cpu(folders, family, tmp_path):
    rng = np.random.default_rng(0)
    words = ["fox", "dog", "lazy", "jumps", "over", "the", "brown"]
    lines = [json.dumps({"text": " ".join(rng.choice(words, n))}) for n in rng.integers(4, 60, 40)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    states = {}
    for device in ("cpu", "cuda"):
        config = ExtractConfig(
            str(folders[family]),
            tmp_path / "d.jsonl",
            tmp_path / device,
            taps=(0, 3),
            seq_len=SEQ_LEN,
            rows_per_shard=4,
            batch_rows=3,
            dtype="float32",
            device=device,
        )
        summary = extract(config, print)
        cache = Cache.open(tmp_path / device)
        assert [p for k in range(cache.plan.shards) for p in cache.verify_shard(k)] == []
        bits = np.zeros((cache.plan.rows, *cache.geometry.row_shape), dtype=np.uint16)
        for row in range(cache.plan.rows):
            shard, i = cache.locate(row)
            shard.read_states(i, bits[row])
        states[device] = torch.from_numpy(bits).view(torch.bfloat16).float()
        assert (summary.peak_gpu_bytes is None) == (device == "cpu")
    error = (states["cuda"] - states["cpu"]).norm() / states["cpu"].norm()
    print(f"{family}: {error:.2e}")
    assert error < 1e-2
