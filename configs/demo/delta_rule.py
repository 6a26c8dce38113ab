"""Differentiable gated delta rule and causal convolution in plain torch, for training on any GPU.

The fused gated delta rule has a wrong backward with Triton 3.4 to 3.7 on Hopper, so the demo
target is trained with these functions, bound over those of the modeling module of transformers.
The chunked form is the UT transform of "Gated Delta Networks" (arXiv 2412.06464).
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [.., C, C], C a power of two.

    Blocks of the diagonal are inverted at doubling sizes: with T the inverse of the blocks of
    size s and M the entries that join two of them, T - T M T inverts the blocks of size 2s. Each
    step is exact block elimination, so it stays accurate where powers of `lower` would overflow.
    """
    size = lower.shape[-1]
    index = torch.arange(size, device=lower.device)
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
    block = 1
    while block < size:
        part = index // block
        joins = (part[:, None] % 2 == 1) & (part[None, :] == part[:, None] - 1)
        step = lower * joins
        inverse = inverse - (step if block == 1 else inverse @ step @ inverse)
        block *= 2
    return inverse


class UnitLowerInverse(torch.autograd.Function):
    """`unit_lower_inverse` with the two-GEMM backward d(lower) = -T' dT T'."""

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        """The inverse, kept for the backward."""
        inverse = unit_lower_inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        """The gradient with respect to the strictly lower part."""
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grads[0] @ turned).tril(-1)


def to_chunks(x: Tensor, heads: int, chunk: int) -> Tensor:
    """[B, S, h, D] -> fp32 (or fp64) [B, H, N, C, D], heads repeated to H, padded with zeros."""
    x = x if x.dtype == torch.float64 else x.float()
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def normalise(x: Tensor) -> Tensor:
    """L2 normalisation of the last dimension with the model's epsilon."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def scan(u: Tensor, w: Tensor, k: Tensor, decay: Tensor, state: Tensor):
    """Run the chunks in order: (states before each chunk, corrected values, last state).

    Per chunk: v = u - w S, then S = decay S + k' v. u [B, H, N, C, V], w and k [B, H, N, C, K],
    decay [B, H, N, 1, 1], state [B, H, K, V].
    """
    states, values = [], []
    for n in range(u.shape[2]):
        value = u[:, :, n] - w[:, :, n] @ state
        states.append(state)
        values.append(value)
        state = state * decay[:, :, n] + k[:, :, n].transpose(-1, -2) @ value
    return torch.stack(states, 2), torch.stack(values, 2), state


def chunked(query, key, value, g, beta, state: Tensor | None, chunk: int, norm: bool):
    """The rule on [B, S, h, D] inputs: (output [B, S, H, V], last state [B, H, K, V])."""
    length, heads = value.shape[1:3]
    q, k, v = (to_chunks(x, heads, chunk) for x in (query, key, value))  # [B, H, N, C, D]
    decay, b = (to_chunks(x.unsqueeze(-1), heads, chunk) for x in (g, beta))  # [B, H, N, C, 1]
    if norm:
        q, k = normalise(q), normalise(k)
    q = q * q.shape[-1] ** -0.5
    total = decay.cumsum(3)  # log decay since the chunk's start
    pair = total - total.transpose(-1, -2)  # [B, H, N, C, C]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    pair = pair.masked_fill(~causal, float("-inf")).exp()
    inverse = UnitLowerInverse.apply((((k * b) @ k.transpose(-1, -2)) * pair).tril(-1))
    u = inverse @ (v * b)
    w = inverse @ (k * b * total.exp())
    last = total[..., -1:, :]
    if state is None:
        state = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    late = k * (last - total).exp()
    states, values, state = scan(u, w, late, last.exp(), state.to(q.dtype))
    out = (q * total.exp()) @ states + ((q @ k.transpose(-1, -2)) * pair) @ values
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def single(query, key, value, g, beta, state: Tensor, norm: bool):
    """One token, as `chunked`: S = exp(g) S, then S += k beta (v - k' S), output q' S."""
    heads = value.shape[2]
    q, k, v = (to_chunks(x, heads, 1)[:, :, 0] for x in (query, key, value))  # [B, H, 1, D]
    decay, b = (to_chunks(x.unsqueeze(-1), heads, 1)[:, :, 0] for x in (g, beta))  # [B, H, 1, 1]
    if norm:
        q, k = normalise(q), normalise(k)
    state = state.to(q.dtype) * decay.exp()
    state = state + k.transpose(-1, -2) * (b * (v - k @ state))
    return (q * q.shape[-1] ** -0.5 @ state).transpose(1, 2), state


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """The signature that transformers calls, for whole sequences and for single steps alike.

    query and key [B, S, h, K] with h dividing H, value [B, S, H, V], g (log decay) and beta
    [B, S, H]; returns (output [B, S, H, V] in the query's dtype, state [B, H, K, V] or None).
    Computes in fp32 at least, outside autocast, for the decays' sake.
    """
    norm = use_qk_l2norm_in_kernel
    with torch.autocast(query.device.type, enabled=False):
        if query.shape[1] == 1 and initial_state is not None:
            out, state = single(query, key, value, g, beta, initial_state, norm)
        else:
            out, state = chunked(query, key, value, g, beta, initial_state, chunk_size, norm)
    return out.to(query.dtype), state if output_final_state else None


def causal_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Depthwise causal convolution of [B, C, S] with weight [C, W], then SiLU if asked for.

    A sum of W shifted products: it fuses into one pointwise kernel, unlike a grouped conv1d.
    """
    length, width = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0)).to(weight.dtype)
    out = padded[..., :length] * weight[:, :1]
    for tap in range(1, width):
        out = out + padded[..., tap : tap + length] * weight[:, tap : tap + 1]
    out = out if bias is None else out + bias[:, None]
    out = F.silu(out) if activation in ("silu", "swish") else out
    return out.to(hidden_states.dtype)


def causal_conv_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """One step of `causal_conv`; conv_state [B, C, W'] is moved on in place."""
    joined = torch.cat([conv_state, hidden_states], dim=-1)
    conv_state.copy_(joined[..., -conv_state.shape[-1] :])
    return causal_conv(joined, weight, bias, activation)[..., -hidden_states.shape[-1] :]


def bind(module: ModuleType) -> None:
    """Put these functions in place of those of the modeling module, for the whole process."""
    for name, function in {
        "torch_chunk_gated_delta_rule": delta_rule,
        "torch_recurrent_gated_delta_rule": delta_rule,
        "causal_conv1d_fn": causal_conv,
        "causal_conv1d_update": causal_conv_step,
    }.items():
        if not hasattr(module, name):
            raise SystemExit(f"{module.__name__} has no {name}: this transformers is not supported")
        setattr(module, name, function)
