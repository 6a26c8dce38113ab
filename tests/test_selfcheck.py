"""The proofs before the first shard: fused = reference, packed = alone."""

import itertools
from pathlib import Path

import pytest
import torch

from dflash_cache import reference, selfcheck
from dflash_cache.errors import UsageError
from dflash_cache.fused import Fused
from dflash_cache.packed import PackedRows
from dflash_cache.selfcheck import Trace, apart, prove, typical
from dflash_cache.target import Target
from tests.test_target import packed_row, relative
from tests.tiny_models import kimi_config, moe_config, save_model, tiny_dense, tiny_hybrid

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "hybrid": tiny_hybrid(root / "hybrid"),
        "dense": tiny_dense(root / "dense"),
        "moe": save_model(root / "moe", moe_config("qwen3_5_moe")),
        "kimi": save_model(root / "kimi", kimi_config()),
    }


def fake_fused(respects_documents: bool, rule: str = "gated_delta_rule") -> Fused:
    """What the fused kernels promise, in torch, so that their calls are tested without CUDA."""

    def chunk(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu):
        assert use_qk_l2norm_in_kernel
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        ends = cu_seqlens.tolist() if respects_documents else [0, q.shape[1]]
        parts = [
            reference.delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)))[0]
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts, dim=1), None

    def conv(x, weight, bias, activation, document=None, cu_seqlens=None):
        rows = PackedRows(document + 1, CPU)  # padding is a segment too
        return rows.conv(x, weight, bias, activation)

    return Fused(chunk, chunk, conv, "conv", rule)


@pytest.mark.parametrize(
    ("family", "rule"),
    [("hybrid", "gated_delta_rule"), ("kimi", "kda"), ("moe", "gated_delta_rule")],
)
def test_the_calls_of_fused_kernels_give_the_states_of_the_reference(folders, family, rule):
    target = Target.load(str(folders[family]), taps=[0, 3])
    arrays = [torch.cat(x) for x in zip(packed_row(), packed_row(seed=1), strict=True)]
    want = target.run_rows(*arrays)
    target.fused = fake_fused(True, rule)
    have = target.run_rows(*arrays)
    assert relative(have[:, :102], want[:, :102]) < 1e-6
    said = f"layer 0 linear_attention: delta fla.chunk_{rule}, conv conv"
    assert target.describe_kernels()[1] == said


@pytest.mark.parametrize("family", ["hybrid", "kimi"])
def test_good_fused_kernels_pass_and_of_bad_ones_the_layer_is_named(folders, family):
    target = Target.load(str(folders[family]), taps=[2])
    target.fused = fake_fused(respects_documents=True)
    assert "fused = reference (checked, error" in prove(target)
    target.fused = fake_fused(respects_documents=False)
    with pytest.raises(UsageError, match="layer 0: the fused delta rule differs"):
        prove(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["hybrid", "dense", "moe", "kimi"])
def test_on_the_cpu_a_document_alone_is_shown_to_equal_the_packed_one(folders, family, dtype):
    target = Target.load(str(folders[family]), taps=[2], dtype=dtype)
    said = prove(target)
    assert said.startswith(target.describe_kernels()[0] + "; packed = alone (checked, error ")
    assert said.endswith(f"<= {selfcheck.TOLERANCE_ALONE[dtype]:.0e})")


def leak_through(layer: torch.nn.Module) -> None:
    """A mixing of tokens that no kernel of ours knows of, as in a model with code of its own."""
    layer.mlp.register_forward_hook(lambda _m, _i, out: out + out.roll(1, dims=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_mixes_tokens_by_itself_is_found_and_named(folders, dtype):
    target = Target.load(str(folders["hybrid"]), taps=[2], dtype=dtype)
    leak_through(target.decoder.layers[1])
    with pytest.raises(UsageError, match=r"layer 1: a document in a packed row .* cannot be run"):
        prove(target)


def test_attention_across_documents_is_found(folders, monkeypatch):
    target = Target.load(str(folders["dense"]), taps=[2])

    def whole_row(self, q, k, v, scale, window):
        self.count("attention", "one row")
        return reference.causal_attention(q, k, v, scale, window)

    monkeypatch.setattr(PackedRows, "attend", whole_row)
    with pytest.raises(UsageError, match="layer 0: a document in a packed row has other states"):
        prove(target)


def test_positions_that_run_on_through_the_row_are_found(folders):
    target = Target.load(str(folders["dense"]), taps=[2])
    embed = target.decoder.embed_tokens
    embed.register_forward_hook(lambda _m, _i, out: out + torch.arange(out.shape[1])[:, None])
    with pytest.raises(UsageError, match="the embedding: a document in a packed row"):
        prove(target)


def test_the_check_leaves_no_hooks_and_changes_no_states(folders):
    target = Target.load(str(folders["hybrid"]), taps=[0, 2])
    before = target.run_rows(*packed_row())
    hooks = [len(x._forward_pre_hooks) + len(x._forward_hooks) for x in target.decoder.layers]
    prove(target)
    after = [len(x._forward_pre_hooks) + len(x._forward_hooks) for x in target.decoder.layers]
    assert hooks == after
    assert torch.equal(before, target.run_rows(*packed_row()))


def test_the_check_is_short_on_the_cpu(folders, monkeypatch):
    target, seen = Target.load(str(folders["dense"]), taps=[2]), []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda r, ids, p: seen.append(ids.numel()) or forward(r, ids, p)
    )
    prove(target)
    assert sum(seen) <= 100


def test_a_single_token_that_chose_another_expert_does_not_count():
    before, want = torch.zeros(1, 3, 4), torch.ones(1, 3, 4)
    have = want.clone()
    have[0, 1] = -5
    good, bad = apart(want, want, before), apart(have, want, before)
    assert typical([good, bad, good]) == 0
    assert typical([bad, bad, good]) > 1  # the same place in most documents
    have[0, 2] = -5
    assert typical([good, apart(have, want, before), good]) > 1  # most of a document


def test_a_target_with_broken_weights_is_left_to_the_guard(folders):
    target = Target.load(str(folders["dense"]), taps=[2])
    target.decoder.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    assert "packed = alone (checked" in prove(target)  # the embedding is
    target.decoder.embed_tokens.weight.fill_(float("nan"))
    assert prove(target).endswith(
        "packed = alone (not checked: the target's states are not finite)"
    )


def test_a_state_that_is_finite_only_alone_is_a_difference():
    before, want = torch.zeros(1, 3, 4), torch.ones(1, 3, 4)
    broken = want.clone()
    broken[0, 0, 0] = float("nan")
    assert apart(broken, want, before)[0] == float("inf")
    assert apart(want, broken, before)[0] == float("inf")
    assert apart(broken, broken, before)[0].isnan()
    assert typical([apart(broken, broken, before)] * 3) == 0


def test_a_trace_feeds_the_layers_what_it_is_told(folders):
    target = Target.load(str(folders["dense"]), taps=[2])
    ids, document, position = packed_row((50,), 50)
    with Trace().watching(target) as first:
        target.run_rows(ids, document, position)
    other = ids.roll(1)
    with Trace(first.inputs).watching(target) as second:
        target.run_rows(other, document, position)
    assert not torch.equal(second.inputs[0], first.inputs[0])
    for have, want in zip(second.outputs, first.outputs, strict=True):
        assert torch.equal(have, want)
