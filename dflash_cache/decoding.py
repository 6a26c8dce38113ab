"""Decode with a target token by token or block by block, and take tokens of a block back exactly.

The states are our own, not transformers' cache, whose `crop` loses the recurrent state of a
GatedDeltaNet in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache import reference
from dflash_cache.devices import choose_device, choose_dtype
from dflash_cache.errors import UsageError
from dflash_cache.fused import Fused
from dflash_cache.kernels import REFERENCE, Runner, check_layers
from dflash_cache.target import Target

# Blocks up to this length run through the kernel of plain decoding, so that verifying a block
# rounds as decoding it token by token does, and a short prompt compiles and tunes nothing else.
SHORT = 128
FIRST_CAPACITY = 256


@dataclass
class Step:
    """logits [n, V] and taps [n, T, D] of the n tokens asked for, on the target's device."""

    logits: Tensor
    taps: Tensor


@dataclass
class KeyValues:
    """Growing buffers of one attention layer: k, v [1, KV, capacity, h], `length` of it used."""

    k: Tensor
    v: Tensor
    length: int = 0

    @staticmethod
    def like(k: Tensor, v: Tensor) -> "KeyValues":
        empty = [x.new_empty(1, x.shape[1], FIRST_CAPACITY, x.shape[3]) for x in (k, v)]
        return KeyValues(empty[0], empty[1])

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [1, KV, m, h]; returns views of all that is stored."""
        end = self.length + k.shape[2]
        while end > self.k.shape[2]:
            self.k, self.v = (torch.cat([x, torch.empty_like(x)], dim=2) for x in (self.k, self.v))
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


@dataclass
class Recurrent:
    """One linear-attention layer: the last inputs of its convolution [1, C, W-1], and its state.

    `before` holds both as they were before the last block, `conv_inputs` [1, C, m] and
    `delta_inputs` (q, k, v, g, beta) what the block brought, to replay a part of it.
    """

    conv: Tensor | None = None
    state: Tensor | None = None  # [1, Hv, dk, dv] float32
    before: tuple[Tensor | None, Tensor | None] = (None, None)
    conv_inputs: Tensor | None = None
    delta_inputs: tuple[Tensor, ...] = ()


class DecodeStates(Runner):
    """The mixers of one sequence that continues; every call adds the tokens of one block."""

    def __init__(self, fused: Fused | None):
        super().__init__()
        self.fused = fused
        self.recurrent: dict[int, Recurrent] = {}
        self.attention: dict[int, KeyValues] = {}

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        layer = self.recurrent.setdefault(self.layer, Recurrent())
        layer.before, layer.conv_inputs = (layer.conv, layer.state), x
        first = layer.conv is None
        history = self._history(layer, x, weight)
        layer.conv = torch.cat([history, x], dim=-1)[..., x.shape[-1] :]
        if first and self.fused is not None and x.shape[-1] > SHORT:
            self.count("conv", self.fused.conv_name)
            return self.fused.conv(x, weight, bias, activation)
        self.count("conv", REFERENCE)
        return reference.causal_conv(x, weight, bias, activation, history)

    @staticmethod
    def _history(layer: Recurrent, x: Tensor, weight: Tensor) -> Tensor:
        if layer.conv is not None:
            return layer.conv
        return x.new_zeros(*x.shape[:2], weight.shape[-1] - 1)

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        layer = self.recurrent[self.layer]
        layer.delta_inputs = (q, k, v, g, beta)
        output, layer.state = self._delta(layer.delta_inputs, layer.state)
        return output

    def _delta(self, inputs: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused is None:
            self.count("delta", REFERENCE)
            q, k, v, g, beta = inputs
            return reference.delta_rule(q, k, v, g, beta, state)
        short = inputs[0].shape[1] <= SHORT
        self.count("delta", f"fla.{'fused_recurrent' if short else 'chunk'}_{self.fused.rule}")
        q, k, v, g, beta = (x.contiguous() for x in inputs)
        return (self.fused.recurrent if short else self.fused.chunk)(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        self.count("attention", "sdpa")
        if self.layer not in self.attention:
            self.attention[self.layer] = KeyValues.like(k, v)
        k, v = self.attention[self.layer].append(k, v)
        return reference.causal_attention(q, k, v, scale, window)

    def keep(self, kept: int, block: int) -> None:
        """Of the last block of `block` tokens keep the first `kept`."""
        for stored in self.attention.values():
            stored.length -= block - kept
        for index, layer in self.recurrent.items():
            self.layer = index
            self._replay(layer, kept, block)

    def _replay(self, layer: Recurrent, kept: int, block: int) -> None:
        if kept == block:
            return
        (conv, state), inputs = layer.before, layer.conv_inputs
        if inputs is None or layer.conv is None:
            raise UsageError("there is no block to take back")
        width = layer.conv.shape[-1]
        before = torch.zeros_like(layer.conv) if conv is None else conv
        layer.conv = torch.cat([before, inputs[..., :kept]], dim=-1)[..., kept : kept + width]
        layer.state = state
        if kept:
            prefix = tuple(x[:, :kept] for x in layer.delta_inputs)
            _, layer.state = self._delta(prefix, state)


class TargetDecoder:
    """One sequence of a fully loaded target: `prefill`, then `verify` and `rollback` in turns."""

    def __init__(self, target: Target):
        if len(target.kinds) != target.num_layers:
            raise UsageError("decoding needs the whole target: load it with full=True")
        self.target = target
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._states = DecodeStates(self.target.fused)
        self._length = self._block = 0

    @property
    def length(self) -> int:
        """Tokens that the states hold."""
        return self._length

    def embed(self, ids: Tensor) -> Tensor:
        """ids [..] -> their embeddings [.., D] as the target's first layer gets them."""
        with torch.no_grad():
            return self.target.model.get_input_embeddings()(ids.to(self.target.device))

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D], in the target's dtype and on its device."""
        return self.target.model.get_output_embeddings().weight

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, from the target's generation config or else its config."""
        settings = self.target.model.generation_config or self.target.config
        stops = getattr(settings, "eos_token_id", None)
        return tuple(stops if isinstance(stops, list | tuple) else [] if stops is None else [stops])

    def describe(self) -> str:
        """What computes the target's layers, in one line."""
        return self.target.describe_kernels()[0]

    def prefill(self, ids: Tensor) -> Step:
        """Start anew with the prompt ids [n] -> logits [1, V] of its last token, taps [n, T, D]."""
        self.reset()
        step = self._run(ids, logits_to_keep=1)
        self._block = 0
        return step

    def verify(self, ids: Tensor) -> Step:
        """Continue with the block ids [m] -> logits [m, V] (row i: after ids[i]), taps [m, T, D].

        Plain decoding is a block of one token.
        """
        return self._run(ids, logits_to_keep=0)

    def rollback(self, keep: int) -> None:
        """Of the block last verified keep the first `keep` tokens, 0..m, as if only they had come.

        Keys are cropped; convolution and recurrent states are restored to what they were before
        the block, and the kept tokens replayed.
        """
        if not 0 <= keep <= self._block:
            raise UsageError(
                f"cannot keep {keep} tokens of the last block: it has {self._block} to take back"
            )
        self._states.keep(keep, self._block)
        self._length -= self._block - keep
        self._block = 0

    def _run(self, ids: Tensor, *, logits_to_keep: int) -> Step:
        if ids.ndim != 1 or not len(ids):
            raise UsageError(
                f"token ids must be one list of at least one id, not {list(ids.shape)}"
            )
        position = torch.arange(self._length, self._length + len(ids))[None]
        taps, logits = self.target.forward(
            self._states, ids[None], position, logits_to_keep=logits_to_keep
        )
        check_layers(self._states, self.target.kinds, self.target.fused)
        self._length += len(ids)
        self._block = len(ids)
        return Step(logits[0] if logits is not None else taps.new_empty(0), taps[0])


def load_decoder(
    model: str,
    *,
    taps: Sequence[int],
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TargetDecoder:
    """Load the whole target `model` (folder or hub id) to decode with; taps as in `Target.load`."""
    place = choose_device(device)
    target = Target.load(
        model,
        taps=taps,
        device=str(place),
        dtype=choose_dtype(dtype, place),
        full=True,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    return TargetDecoder(target)
