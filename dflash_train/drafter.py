"""The DFlash drafter (arXiv 2602.06036), its weights named as z-lab's checkpoints name them.

The target's states at the taps become one feature a token, c = hidden_norm(fc(taps)), which every
layer turns into keys and values of its own. The block's slots are the queries; they attend to the
features before the anchor and to each other. Embedding and head are the target's, frozen, and
never part of the drafter.

Weights may be kept in another precision than the computation's: every layer casts its weight to
its input's dtype, so fp32 masters compute in bf16 when the embedded tokens are bf16, with or
without autocast.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_train.attention import Mask, Masks, attend, join
from dflash_train.drafter_config import DrafterConfig, default_config

__all__ = ["Drafter", "DrafterConfig", "default_config"]

KeyValue = tuple[Tensor, Tensor]  # each [B, KV, n, h]
Rope = tuple[Tensor, Tensor]  # cos and sin, each fp32 [B, 1, n, h]


class Drafter(nn.Module):
    """The drafter; 58 weights for 5 layers.

    Weights start as normal(0, 0.02), norms as 1, from torch's global generator.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = Linear(config.taps * size, size)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def forward(
        self, taps: Tensor, noise: Tensor, ctx_positions: Tensor, q_positions: Tensor, masks: Masks
    ) -> Tensor:
        """Hidden states of the slots of many blocks at once, for training.

        Args:
            taps: `[B, S, T, D]` or `[B, S, T*D]`, the target's states, any float dtype.
            noise: `[B, Q, D]`, the embedded tokens of the slots; its dtype is the computation's.
            ctx_positions: `[B, S]`, position of each token within its document.
            q_positions: `[B, Q]`, position of each slot within its document.
            masks: of `build_masks`.

        Returns:
            `[B, Q, D]` after the final norm, to be multiplied by the target's head.
        """
        context = self._features(taps.to(noise.dtype))  # [B, S, D]
        rope = self._rope(ctx_positions)
        return self._run(
            noise,
            self._rope(q_positions),
            [layer.context(context, rope) for layer in self._layers],
            [masks.of(kind) for kind in self._kinds],
        )

    def context_kv(self, taps: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context tokens, to be kept while decoding.

        Args:
            taps: `[B, n, T, D]` or `[B, n, T*D]`.
            positions: `[B, n]` within the document.

        Returns:
            One `(k, v)` for each layer, each `[B, KV, n, h]` in the dtype of the weights.
        """
        context = self._features(taps.to(self.fc.weight.dtype))
        rope = self._rope(positions)
        return [layer.context(context, rope) for layer in self._layers]

    def draft(self, noise: Tensor, q_positions: Tensor, context: list[KeyValue]) -> Tensor:
        """Hidden states of one block, whose context are the n tokens before it.

        Args:
            noise: `[B, K, D]`, the embedded anchor and K-1 mask tokens.
            q_positions: `[B, K]`.
            context: of `context_kv`, for the tokens of positions anchor-n .. anchor-1.

        Returns:
            `[B, K, D]` after the final norm.
        """
        length, slots = context[0][0].shape[2], noise.shape[1]
        masks = {
            kind: self._block_mask(kind, length, slots, noise.device) for kind in set(self._kinds)
        }
        return self._run(
            noise, self._rope(q_positions), context, [masks[kind] for kind in self._kinds]
        )

    @property
    def _layers(self) -> "list[Layer]":
        return cast("list[Layer]", self.layers)

    @property
    def _kinds(self) -> tuple[str, ...]:
        return self.config.layer_types

    def _features(self, taps: Tensor) -> Tensor:
        flat = taps.flatten(2) if taps.ndim == 4 else taps
        return self.hidden_norm(self.fc(flat))

    def _run(
        self, noise: Tensor, rope: Rope, context: list[KeyValue], masks: Sequence[Mask]
    ) -> Tensor:
        hidden = noise
        for layer, keys_values, mask in zip(self._layers, context, masks, strict=True):
            hidden = layer(hidden, rope, keys_values, mask)
        return self.norm(hidden)

    def _rope(self, positions: Tensor) -> Rope:
        """Angles of RoPE over the whole head, from absolute positions `[B, n]`."""
        size = self.config.head_dim
        power = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        inverse = 1.0 / self.config.rope_theta**power  # [h/2]
        angles = positions.float()[:, None, :, None] * inverse
        angles = torch.cat([angles, angles], dim=-1)  # [B, 1, n, h]
        return angles.cos(), angles.sin()

    def _block_mask(self, kind: str, length: int, slots: int, device: torch.device) -> Mask:
        """What the slots of one block see of `length` context keys and of each other."""
        window = self.config.sliding_window if kind == "sliding_attention" else None
        causal = self.config.causal(kind)
        if not causal and (window is None or length + slots <= window):
            return Mask()  # all of it
        slot = torch.arange(slots, device=device)[:, None]  # [K, 1]
        key = torch.arange(length + slots, device=device) - length  # relative to the anchor
        sees = (key <= slot) if causal else torch.ones_like(key <= slot)
        if window is not None:
            sees = sees & ((slot - key < window) | (key >= 0))
        return Mask(dense=sees)


class Layer(nn.Module):
    """One decoder layer; the context enters its attention as keys and values only."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def context(self, features: Tensor, rope: Rope) -> KeyValue:
        """Keys and values of the features `[B, n, D]`, which skip `input_layernorm`."""
        return self.self_attn.keys_values(features, rope)

    def forward(self, hidden: Tensor, rope: Rope, context: KeyValue, mask: Mask) -> Tensor:
        """hidden `[B, Q, D]` to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, context, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Queries from the slots; keys and values from the context features and the slots."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(size, config.num_attention_heads * self.head_dim)
        self.k_proj = Linear(size, config.num_key_value_heads * self.head_dim)
        self.v_proj = Linear(size, config.num_key_value_heads * self.head_dim)
        self.o_proj = Linear(config.num_attention_heads * self.head_dim, size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> KeyValue:
        """Keys and values of x `[B, n, D]`: each `[B, KV, n, h]`."""
        keys = _rotate(self.k_norm(self._heads(self.k_proj(x))), rope)
        return keys, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rope: Rope, context: KeyValue, mask: Mask) -> Tensor:
        """x `[B, Q, D]`, already normed, to the same shape."""
        queries = _rotate(self.q_norm(self._heads(self.q_proj(x))), rope)
        keys, values = self.keys_values(x, rope)
        keys = join(context[0].to(keys.dtype), keys, mask)
        values = join(context[1].to(values.dtype), values, mask)
        out = attend(queries, keys, values, mask)  # [B, H, Q, h]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, n, heads*h]` to `[B, heads, n, h]`."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Linear(nn.Linear):
    """Without bias; computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in at least fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """RoPE on x `[B, heads, n, h]`: pairs (i, i + h/2) turn by the angle of i."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
