"""Reference mixers, packed rows and the binding of a modeling module."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from dflash_cache import fused, kernels, reference
from dflash_cache.errors import UsageError
from dflash_cache.kernels import Runner, bind, bind_layers, check_layers, running
from dflash_cache.packed import PackedRows

CPU = torch.device("cpu")


def delta_inputs(length: int, *, k_heads: int = 2, v_heads: int = 4, batch: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (normal(batch, length, k_heads, 8) for _ in range(2))
    v = normal(batch, length, v_heads, 6)
    g = -torch.nn.functional.softplus(normal(batch, length, v_heads))
    beta = normal(batch, length, v_heads).sigmoid()
    return q, k, v, g, beta


def token_by_token(q, k, v, g, beta, state=None):
    """The definition of the gated delta rule, one token after the other."""
    groups = v.shape[2] // q.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    batch, length, heads, dv = v.shape
    s = torch.zeros(batch, heads, q.shape[-1], dv, dtype=v.dtype) if state is None else state
    outputs = []
    for t in range(length):
        s = s * g[:, t].exp()[..., None, None]
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), s


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_the_chunked_delta_rule_equals_the_token_loop(length):
    inputs = delta_inputs(length)
    output, state = reference.delta_rule(*inputs)
    want, want_state = token_by_token(*inputs)
    torch.testing.assert_close(output, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, want_state, rtol=1e-10, atol=1e-12)


def test_the_delta_rule_continues_from_a_state():
    inputs = delta_inputs(90)
    whole, last = reference.delta_rule(*inputs)
    _, state = reference.delta_rule(*(x[:, :37] for x in inputs))
    rest, again = reference.delta_rule(*(x[:, 37:] for x in inputs), state)
    torch.testing.assert_close(rest, whole[:, 37:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(again, last, rtol=1e-10, atol=1e-12)


def test_strong_decay_does_not_overflow():
    q, k, v, g, beta = (x.float() for x in delta_inputs(128))
    output, state = reference.delta_rule(q, k, v, g * 100, beta)
    assert torch.isfinite(output).all()
    assert torch.isfinite(state).all()


def test_the_convolution_is_causal_and_continues_from_its_history():
    x, weight = torch.randn(1, 6, 20), torch.randn(6, 4)
    whole = reference.causal_conv(x, weight, None, "silu")
    padded = torch.nn.functional.pad(x, (3, 0))
    want = sum(weight[:, i, None] * padded[0, :, i : i + 20] for i in range(4))
    torch.testing.assert_close(whole[0], torch.nn.functional.silu(want), rtol=1e-5, atol=1e-5)
    rest = reference.causal_conv(x[..., 9:], weight, None, "silu", x[..., 6:9])
    torch.testing.assert_close(rest, whole[..., 9:], rtol=1e-5, atol=1e-6)


def test_another_activation_is_refused():
    with pytest.raises(UsageError, match="gelu"):
        reference.causal_conv(torch.randn(1, 2, 3), torch.randn(2, 4), None, "gelu")


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("m", [1, 5, 12])
def test_attention_of_the_last_positions_equals_a_dense_softmax(m, window):
    n = 12
    q, k, v = torch.randn(1, 4, m, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    for row in range(m):
        for j in range(n):
            i = n - m + row
            if j > i or (window is not None and j <= i - window):
                scores[:, :, row, j] = float("-inf")
    want = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(reference.causal_attention(q, k, v, 0.3, window), want)


DOCUMENT = torch.tensor([[1] * 5 + [2] * 9 + [0] * 2, [3] * 16])


def test_packed_mixers_restart_at_every_document_and_give_zeros_in_the_padding():
    rows = PackedRows(DOCUMENT, CPU)
    inputs = delta_inputs(16)
    x, weight = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    delta, conv = rows.delta(*inputs), rows.conv(x, weight, None, "silu")
    for row, start, stop in [(0, 0, 5), (0, 5, 14), (1, 0, 16)]:
        part = [i[row : row + 1, start:stop] for i in inputs]
        torch.testing.assert_close(delta[row, start:stop], token_by_token(*part)[0][0])
        alone = reference.causal_conv(x[row : row + 1, :, start:stop], weight, None, "silu")
        torch.testing.assert_close(conv[row, :, start:stop], alone[0])
    assert not delta[0, 14:].any()
    assert not conv[0, :, 14:].any()


@pytest.mark.parametrize("window", [None, 3])
def test_attention_per_document_equals_attention_with_a_mask(window):
    rows = PackedRows(DOCUMENT, CPU)
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    per_document = rows.attend(q, k, v, 0.3, window)
    masked = rows.attend_masked(q, k, v, 0.3, window)
    real = (DOCUMENT != 0)[:, None, :, None]
    torch.testing.assert_close(per_document, masked * real)


def test_boundaries_of_the_flattened_batch_cover_padding_too():
    rows = PackedRows(DOCUMENT, CPU)
    assert rows.cu_seqlens_host.tolist() == [0, 5, 14, 16, 32]
    assert rows.documents == [(0, 0, 5), (0, 5, 14), (1, 0, 16)]


def fake_module() -> ModuleType:
    module = ModuleType("modeling_fake")
    for name in kernels.dispatchers():
        setattr(module, name, lambda *args, name=name, **kwargs: name)
    return module


def test_without_an_active_runner_a_bound_module_does_what_it_did():
    module = fake_module()
    bind(module)
    x = torch.zeros(1)
    assert module.causal_conv1d_fn(x, x) == "causal_conv1d_fn"
    assert module.torch_chunk_gated_delta_rule(x, x, x, x, x) == "torch_chunk_gated_delta_rule"
    assert module.causal_conv1d_update(x) == "causal_conv1d_update"


def test_binding_twice_changes_nothing():
    module = fake_module()
    bind(module)
    once = [getattr(module, name) for name in kernels.dispatchers()]
    bind(module)
    assert once == [getattr(module, name) for name in kernels.dispatchers()]


def test_an_active_runner_computes_and_cached_functions_are_refused():
    module = fake_module()
    bind(module)
    rows = PackedRows(torch.ones(1, 4), CPU)
    q, k, v, g, beta = (x[:1, :4] for x in delta_inputs(4))
    with running(rows):
        kernels.enter_layer(7)
        out, state = module.torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
        )
        with pytest.raises(UsageError, match="unknown way"):
            module.torch_recurrent_gated_delta_rule(q, k, v)
    torch.testing.assert_close(out, token_by_token(q, k, v, g, beta)[0])
    assert state is None
    assert rows.implementations(7, "delta") == [kernels.REFERENCE]


def test_a_module_without_the_functions_is_refused_with_what_is_supported():
    with pytest.raises(UsageError, match=r"no causal_conv1d_fn.*qwen3_next"):
        bind(ModuleType("modeling_other"))


def test_a_linear_layer_of_another_kind_is_refused():
    with pytest.raises(UsageError, match=r"layer 0 .*tokens with Linear.*supported are"):
        bind_layers([nn.Linear(2, 2)], ["linear_attention"])


def test_a_layer_that_ran_elsewhere_is_noticed():
    with pytest.raises(UsageError, match=r"layer 0 .*outside of our control"):
        check_layers(Runner(), ["full_attention"], None)


def test_the_slow_reference_where_fused_kernels_belong_is_noticed():
    runner = Runner()
    runner.layer = 0
    runner.count("delta", kernels.REFERENCE)
    runner.count("conv", kernels.REFERENCE)
    bound = fused.Fused(print, print, print, "conv")
    with pytest.raises(UsageError, match="layer 0 ran the slow torch reference"):
        check_layers(runner, ["linear_attention"], bound)


@pytest.mark.parametrize("argument", kernels.REFUSED)
def test_attention_that_we_do_not_compute_is_refused(argument):
    q = torch.randn(1, 2, 3, 4)
    with running(PackedRows(torch.ones(1, 3), CPU)), pytest.raises(UsageError, match=argument):
        kernels._attention(SimpleNamespace(), q, q, q, None, **{argument: 1.0})


def test_a_sliding_layer_that_does_not_tell_its_window_is_refused():
    runner = Runner()
    runner.layer = 0
    runner.count("attention", "sdpa")
    check_layers(runner, ["full_attention"], None)
    with pytest.raises(UsageError, match=r"layer 0 .*does not tell its window"):
        check_layers(runner, ["sliding_attention"], None)
    runner.windows[0] = 8
    check_layers(runner, ["sliding_attention"], None)


def test_a_linear_layer_whose_convolution_ran_elsewhere_is_noticed():
    runner = Runner()
    runner.layer = 0
    runner.count("delta", kernels.REFERENCE)
    with pytest.raises(UsageError, match="outside of our control"):
        check_layers(runner, ["linear_attention"], None)


def channel_loop(q, k, v, g, beta):
    """Kimi Delta Attention by its definition: every row of the state decays by itself."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    state = torch.zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None]
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_the_delta_rule_with_a_decay_per_channel_equals_the_token_loop(length):
    q, k, v, _, beta = delta_inputs(length)
    g = -torch.nn.functional.softplus(torch.randn(*v.shape[:3], q.shape[-1], dtype=v.dtype))
    output, state = reference.delta_rule(q, k, v, g, beta)
    want, want_state = channel_loop(q, k, v, g, beta)
    torch.testing.assert_close(output, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, want_state, rtol=1e-10, atol=1e-12)


def test_equal_decays_of_all_channels_are_one_decay_a_head():
    q, k, v, g, beta = delta_inputs(70)
    channels = g[..., None].expand(*g.shape, q.shape[-1])
    one, other = (reference.delta_rule(q, k, v, x, beta)[0] for x in (g, channels))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
