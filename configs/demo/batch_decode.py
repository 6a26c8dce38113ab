"""Greedy decoding of thousands of prompts at once with the demo target, every buffer fixed.

transformers' `generate` spends most of a step on launching small kernels; here one step is a fixed
sequence of torch operations on fixed buffers, captured in a CUDA graph and replayed for every token
of prompt and answer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeltaLayer:
    """A GatedDeltaNet layer of one token a sequence: its convolution window and recurrent state."""

    def __init__(self, layer: nn.Module, batch: int):
        self.mixer = layer.linear_attn
        like = self.mixer.in_proj_qkv.weight
        width = self.mixer.conv_kernel_size
        self.window = like.new_zeros(batch, self.mixer.conv_dim, width)
        shape = (batch, self.mixer.num_v_heads, self.mixer.head_k_dim, self.mixer.head_v_dim)
        self.state = torch.zeros(shape, device=like.device)  # fp32, as the kernels keep it

    def reset(self) -> None:
        self.window.zero_()
        self.state.zero_()

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, D] -> [B, D]; the recurrent form of the gated delta rule (arXiv 2412.06464)."""
        m = self.mixer
        self.window.copy_(torch.cat([self.window[:, :, 1:], m.in_proj_qkv(x)[:, :, None]], dim=2))
        mixed = F.silu((self.window * m.conv1d.weight.squeeze(1)).sum(2)).float()
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=1)
        q, k = (self._key_heads(part) for part in (q, k))  # [B, Hv, dk]
        v = v.unflatten(1, (m.num_v_heads, -1))  # [B, Hv, dv]
        beta = m.in_proj_b(x).float().sigmoid()[:, :, None]
        decay = (-m.A_log.float().exp() * F.softplus(m.in_proj_a(x).float() + m.dt_bias)).exp()
        self.state.mul_(decay[:, :, None, None])
        known = torch.einsum("bhk,bhkv->bhv", k, self.state)
        self.state.addcmul_(k[..., None], ((v - known) * beta)[:, :, None])
        out = torch.einsum("bhk,bhkv->bhv", q * m.head_k_dim**-0.5, self.state).to(x.dtype)
        gate = m.in_proj_z(x).unflatten(1, (m.num_v_heads, -1))
        return m.out_proj(m.norm(out, gate).flatten(1))

    def _key_heads(self, x: Tensor) -> Tensor:
        m = self.mixer
        heads = x.unflatten(1, (m.num_k_heads, -1))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        return heads.repeat_interleave(m.num_v_heads // m.num_k_heads, dim=1)


class AttentionLayer:
    """A gated full-attention layer of one token a sequence, over keys kept in fixed buffers."""

    def __init__(self, layer: nn.Module, batch: int, capacity: int):
        self.mixer = layer.self_attn
        like, heads = self.mixer.k_proj.weight, self.mixer.config.num_key_value_heads
        shape = (batch, heads, capacity, self.mixer.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def reset(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def __call__(self, x: Tensor, place: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, D], place [1] the token's position, rope cos and sin [1, 1, r] -> [B, D]."""
        m = self.mixer
        q, gate = m.q_proj(x).unflatten(1, (-1, 2 * m.head_dim)).chunk(2, dim=2)
        q = _rotate(m.q_norm(q), rope)  # [B, H, h]
        k = _rotate(m.k_norm(m.k_proj(x).unflatten(1, (-1, m.head_dim))), rope)
        v = m.v_proj(x).unflatten(1, (-1, m.head_dim))
        self.keys.index_copy_(2, place, k[:, :, None])
        self.values.index_copy_(2, place, v[:, :, None])
        seen = torch.arange(self.keys.shape[2], device=x.device) <= place
        out = F.scaled_dot_product_attention(
            q[:, :, None], self.keys, self.values, attn_mask=seen[None, None, None], enable_gqa=True
        )
        return m.o_proj(out[:, :, 0].flatten(1) * gate.flatten(1).sigmoid())


class BatchDecoder:
    """The model with the states of `batch` sequences of one length, at most `capacity` long."""

    def __init__(self, model: nn.Module, batch: int, capacity: int):
        self.model, self.batch, self.capacity = model, batch, capacity
        device = next(model.parameters()).device
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self.best = torch.zeros(batch, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        body = model.model
        self.mixers = [
            DeltaLayer(layer, batch)
            if layer.block_type == "linear_attention"
            else AttentionLayer(layer, batch, capacity)
            for layer in body.layers
        ]
        positions = torch.arange(capacity, device=device).expand(3, 1, -1)
        self.cos, self.sin = body.rotary_emb(body.embed_tokens.weight[:1, None], positions)
        self.graph = self._capture() if device.type == "cuda" else None

    def _capture(self) -> "torch.cuda.CUDAGraph":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    @torch.no_grad()
    def _step(self) -> None:
        """The token at `place` of every sequence in, the best next one into `best`."""
        body = self.model.model
        rope = (self.cos[0, self.place][None], self.sin[0, self.place][None])  # [1, 1, r]
        x = body.embed_tokens(self.token)
        for layer, mixer in zip(body.layers, self.mixers, strict=True):
            h = layer.input_layernorm(x)
            x = x + (mixer(h) if isinstance(mixer, DeltaLayer) else mixer(h, self.place, rope))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.best.copy_(self.model.lm_head(body.norm(x)).argmax(-1))
        self.place.add_(1)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        """prompts [b, n], b <= batch -> the greedy continuations [b, new_tokens], stops ignored."""
        rows, length = prompts.shape
        if rows > self.batch or length + new_tokens > self.capacity:
            raise ValueError(
                f"{rows} prompts of {length} + {new_tokens} tokens exceed the buffers for "
                f"{self.batch} of {self.capacity}"
            )
        for mixer in self.mixers:
            mixer.reset()
        self.place.zero_()
        made = torch.empty(new_tokens, rows, dtype=torch.long, device=self.token.device)
        for i in range(length + new_tokens - 1):
            if i < length:
                self.token[:rows] = prompts[:, i]
            else:
                self.token.copy_(self.best)
            self.graph.replay() if self.graph else self._step()
            if i >= length - 1:
                made[i - length + 1] = self.best[:rows]
        return made.T


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on the first r of the head's dimensions of x [B, heads, h]."""
    cos, sin = rope
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)
