"""A target's token mixers in plain torch: the CPU path, and what fused kernels must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_cache.errors import UsageError

CHUNK = 64


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, as the fused kernels do it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464), by chunks.

    Per token and head: `S = exp(g) S; S = S + k beta (v - k^T S)^T; o = S^T q / sqrt(dk)`.

    q, k [B, L, Hk, dk]; v [B, L, Hv, dv] with Hv a multiple of Hk; beta [B, L, Hv]; g (log decay)
    [B, L, Hv], or [B, L, Hv, dk] with one decay for each row of S (Kimi Delta Attention, arXiv
    2510.26692); state [B, Hv, dk, dv] or None for zeros. Returns the output [B, L, Hv, dv] in q's
    dtype and the final state. Computes in float32 (float64 if q is).
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    dtype, groups = q.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.to(work).transpose(1, 2) for x in (q, k, v, g, beta))  # [B, H, L, ..]
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    q = (q * q.shape[-1] ** -0.5).repeat_interleave(groups, dim=1)
    k = k.repeat_interleave(groups, dim=1)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[1], k.shape[-1], v.shape[-1])
    state, outputs = state.to(work), []
    for start in range(0, v.shape[2], CHUNK):
        part = [x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta)]
        output, state = _chunk(part, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), state


def _chunk(part: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of c tokens; q, k [B, H, c, dk], v [B, H, c, dv], g [B, H, c] or [.., dk].

    What every token writes, u, depends on what the tokens before it in the chunk wrote:
    `u_i = beta_i (v_i - (e^{d_i} k_i) S - sum_{j<i} (k_i e^{d_i - d_j} k_j) u_j)`, d = cumsum(g):
    a unit lower triangular system. Then outputs and the new state are three products.
    """
    q, k, v, g, beta = part
    decay = (g if g.ndim == k.ndim else g[..., None]).cumsum(2)  # [B, H, c, 1 or dk]
    grown, beta = decay.exp(), beta[..., None]
    ratio = _ratios(decay)
    system = beta * _decayed_products(k, k, ratio)
    wanted = beta * (v - (grown * k) @ state)
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (grown * q) @ state + _decayed_products(q, k, ratio) @ u
    last = decay[:, :, -1:]
    kept = last.exp().transpose(-1, -2)  # [B, H, 1 or dk, 1]
    return output, kept * state + (k * (last - decay).exp()).transpose(-1, -2) @ u


def _ratios(decay: Tensor) -> Tensor:
    """`e^{decay_i - decay_j}` for j <= i, zero for j > i: [B, H, c, c, 1 or dk]."""
    size = decay.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before exp: the upper part would overflow.
    gap = decay[:, :, :, None] - decay[:, :, None]
    return gap.masked_fill(later[..., None], float("-inf")).exp()


def _decayed_products(a: Tensor, k: Tensor, ratio: Tensor) -> Tensor:
    """[B, H, c, c]: `sum_d a_id ratio_ijd k_jd`."""
    if ratio.shape[-1] == 1:
        return (a @ k.transpose(-1, -2)) * ratio[..., 0]
    return torch.einsum("bhid,bhjd,bhijd->bhij", a, k, ratio)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    history: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution: x [B, C, L], weight [C, W], history [B, C, W-1] -> [B, C, L].

    `history` are the inputs before x (None: zeros).
    """
    width = weight.shape[-1]
    before = x.new_zeros(*x.shape[:2], width - 1) if history is None else history.to(x.dtype)
    out = F.conv1d(
        torch.cat([before, x], dim=-1).to(weight.dtype), weight[:, None], bias, groups=x.shape[1]
    )
    return activate(out, activation).to(x.dtype)


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Apply the activation of a convolution; only silu (swish) occurs in GatedDeltaNet."""
    if activation is None:
        return x
    if activation not in ("silu", "swish"):
        raise UsageError(
            f"the target's convolution uses the activation {activation!r}; only silu is supported"
        )
    return F.silu(x)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    """q [B, H, m, h] are the last m of the n positions of k, v [B, KV, n, h] -> [B, H, m, h].

    With a window, position i sees j iff `i - window < j <= i`.
    """
    m, n = q.shape[2], k.shape[2]
    if window is not None and n > window + m - 1:
        # Nobody in the block sees further back than this.
        k, v, n = k[:, :, -(window + m - 1) :], v[:, :, -(window + m - 1) :], window + m - 1
    if m == 1:
        return attend(q, k, v, scale)
    if m == n and (window is None or n <= window):
        return attend(q, k, v, scale, causal=True)
    rows = torch.arange(n - m, n, device=q.device)[:, None]
    return attend(q, k, v, scale, mask=window_mask(rows, n, window))


def window_mask(rows: Tensor, n: int, window: int | None) -> Tensor:
    """bool [m, n]: which keys 0..n-1 the positions `rows` [m, 1] see."""
    columns = torch.arange(n, device=rows.device)[None]
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention with grouped keys: q [B, H, m, h], k and v [B, KV, n, h]."""
    groups = q.shape[1] // k.shape[1]
    # Only the flash kernel takes grouped keys as they are; every other one wants them repeated.
    grouped = groups > 1 and mask is None and q.is_cuda and q.dtype != torch.float32
    if groups > 1 and not grouped:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
