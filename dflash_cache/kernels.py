"""Bind our own token mixers on a target's modeling module, and count which implementation ran.

transformers chooses a kernel per function when the modeling module is imported, and falls back to
a slow one in silence. So its module functions are replaced by dispatchers that ask the active
`Runner` (packed rows or decoding); without an active runner the original functions run, and other
models of the same process notice nothing.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_cache.errors import UsageError

# Not a name with "flash" in it: transformers would look for a flash-attention package.
ATTENTION = "document_attention"
REFERENCE = "torch reference"
SUPPORTED = (
    "supported are full- and sliding-attention models of transformers that go through its "
    "attention interface, and the GatedDeltaNet hybrids qwen3_next, qwen3_5 and qwen3_5_moe"
)
BOUND = "dflash_original"
PIP_FLA = "pip install flash-linear-attention"
# Arguments of attention functions that change the result and that we do not compute.
REFUSED = ("softcap", "s_aux", "position_bias")


class Runner:
    """Computes the token mixers of the layer that runs now (`layer`), and counts what it used."""

    def __init__(self) -> None:
        self.layer = -1
        self.counts: Counter[tuple[int, str, str]] = Counter()

    def count(self, operation: str, implementation: str) -> None:
        self.counts[self.layer, operation, implementation] += 1

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """x [B, C, L], weight [C, W] -> [B, C, L]."""
        raise UsageError(f"{type(self).__name__} runs no GatedDeltaNet layers")

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k [B, L, Hk, dk], v [B, L, Hv, dv], g, beta [B, L, Hv] -> [B, L, Hv, dv]."""
        raise UsageError(f"{type(self).__name__} runs no GatedDeltaNet layers")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """q [B, H, L, h], k, v [B, KV, L, h] -> [B, H, L, h]."""
        raise UsageError(f"{type(self).__name__} runs no attention layers")

    def implementations(self, layer: int, operation: str) -> list[str]:
        """Names of what computed `operation` ("conv", "delta", "attention") in that layer."""
        return sorted(i for (at, op, i) in self.counts if at == layer and op == operation)


_active: list[Runner] = []


@contextmanager
def running(runner: Runner) -> Iterator[Runner]:
    """Everything that a bound model computes inside goes through `runner`; not for two threads."""
    _active.append(runner)
    try:
        yield runner
    finally:
        _active.pop()


def enter_layer(index: int) -> None:
    """Tell the active runner which decoder layer runs now."""
    if _active:
        _active[-1].layer = index


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not _active:
        raise UsageError(f"attention {ATTENTION!r} works only through dflash_cache.target.Target")
    refused = [name for name in REFUSED if kwargs.get(name) is not None]
    if refused or getattr(module, "is_causal", True) is False:
        why = f"uses {refused[0]}" if refused else "is not causal"
        raise UsageError(f"the attention of {type(module).__name__} {why}; {SUPPORTED}")
    output = _active[-1].attend(query, key, value, scaling, sliding_window)  # [B, H, L, h]
    return output.transpose(1, 2).contiguous(), None


# Without an entry of this name among its mask functions, transformers builds no mask at all.
AttentionInterface.register(ATTENTION, _attention)


def _conv(original: Callable) -> Callable:
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        if not _active:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        return _active[-1].conv(hidden_states, weight, bias, activation)

    return causal_conv1d_fn


def _delta(original: Callable) -> Callable:
    def torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
        if not _active:
            return original(query, key, value, g=g, beta=beta, **kwargs)
        if not kwargs.get("use_qk_l2norm_in_kernel") or kwargs.get("initial_state") is not None:
            raise UsageError(
                f"this transformers calls the delta rule in an unknown way; {SUPPORTED}"
            )
        return _active[-1].delta(query, key, value, g, beta), None

    return torch_chunk_gated_delta_rule


def _unused(original: Callable) -> Callable:
    """The functions of cached decoding; we run targets without transformers' cache."""

    def guarded(*args, **kwargs):
        if not _active:
            return original(*args, **kwargs)
        raise UsageError(f"this transformers decodes in an unknown way; {SUPPORTED}")

    return guarded


DISPATCHERS = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta,
    "causal_conv1d_update": _unused,
    "torch_recurrent_gated_delta_rule": _unused,
}


def bind(module: ModuleType) -> None:
    """Replace the mixers of a modeling module; once per module, calling it again does nothing."""
    missing = [name for name in DISPATCHERS if not hasattr(module, name)]
    if missing:
        raise UsageError(f"{module.__name__} has no {missing[0]}, so it cannot be run; {SUPPORTED}")
    for name, dispatcher in DISPATCHERS.items():
        original = getattr(module, name)
        if not hasattr(original, BOUND):
            bound = dispatcher(original)
            setattr(bound, BOUND, original)
            setattr(module, name, bound)


def bind_layers(layers: Sequence[nn.Module], kinds: Sequence[str]) -> None:
    """Bind what the layers use, and have each one announce itself when it runs."""
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if kind == "linear_attention":
            mixers = [m for m in layer.modules() if type(m).__name__.endswith("GatedDeltaNet")]
            if len(mixers) != 1:
                raise UsageError(
                    f"layer {index} ({type(layer).__name__}) has no GatedDeltaNet; {SUPPORTED}"
                )
            bind(sys.modules[type(mixers[0]).__module__])
        layer.register_forward_pre_hook(lambda *_, index=index: enter_layer(index))


@dataclass(frozen=True)
class Fused:
    """The fused kernels, all imported. `conv(x, weight, bias, activation, rows)`: see packed.py."""

    chunk: Callable
    recurrent: Callable
    conv: Callable
    conv_name: str


@lru_cache(maxsize=1)
def load_fused() -> Fused:
    """Import the fused kernels; `UsageError` names what is missing and how to install it."""
    try:
        fla = import_module("fla.ops.gated_delta_rule")
        kernels = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise UsageError(
            f"the target has GatedDeltaNet layers, whose fused kernel does not import ({error}); "
            f"{PIP_FLA}, or use --device cpu"
        ) from error
    conv, conv_name = _load_conv()
    return Fused(*kernels, conv, conv_name)


def _load_conv() -> tuple[Callable, str]:
    try:
        return _cuda_conv(import_module("causal_conv1d").causal_conv1d_fn), "causal_conv1d"
    except (ImportError, RuntimeError, OSError, AttributeError):
        # The same in Triton, which needs no compiler to install.
        function = import_module("fla.modules.causal_conv1d").causal_conv1d
        return _triton_conv(function), "fla.causal_conv1d"


def _cuda_conv(function: Callable) -> Callable:
    def conv(x, weight, bias, activation, document=None, cu_seqlens=None):
        if document is not None and x.stride(1) != 1:
            # Boundaries are only supported with the channels innermost.
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return function(x, weight, bias, seq_idx=document, activation=activation)

    return conv


def _triton_conv(function: Callable) -> Callable:
    def conv(x, weight, bias, activation, document=None, cu_seqlens=None):
        shape = x.transpose(1, 2).shape  # [B, L, C]
        rows = shape[:2] if cu_seqlens is None else (1, -1)
        flat = x.transpose(1, 2).reshape(*rows, shape[2])
        out, _ = function(flat, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
        return out.reshape(shape).transpose(1, 2)

    return conv


def fused_for(device: torch.device, kinds: Sequence[str]) -> Fused | None:
    """The fused kernels if this device and these layers need them, else None (the reference)."""
    return load_fused() if device.type == "cuda" and "linear_attention" in kinds else None


def check_layers(runner: Runner, kinds: Sequence[str], fused: Fused | None) -> None:
    """`UsageError` unless every layer's mixer ran through `runner`, fused where it has to be."""
    for index, kind in enumerate(kinds):
        operation = "delta" if kind == "linear_attention" else "attention"
        used = runner.implementations(index, operation)
        if not used:
            raise UsageError(f"layer {index} ({kind}) ran outside of our control; {SUPPORTED}")
        if fused is not None and operation == "delta" and REFERENCE in used:
            raise UsageError(
                f"layer {index} ran the slow {REFERENCE}, not a fused kernel; {PIP_FLA}"
            )


def describe(
    kinds: Sequence[str], fused: Fused | None, device: torch.device, runner: Runner | None
) -> list[str]:
    """A headline, then one line per layer: what computed its mixer while `runner` was active."""
    linear = kinds.count("linear_attention")
    if fused is not None:
        what = f"fla.chunk_gated_delta_rule, {fused.conv_name} ({linear} GatedDeltaNet layers)"
    elif linear:
        what = f"{REFERENCE} on {device.type.upper()} ({linear} GatedDeltaNet layers)"
    else:
        what = f"sdpa on {device.type.upper()} (no GatedDeltaNet layers)"
    lines = [f"kernels: {what}"]
    if runner is None:
        return lines
    for index, kind in enumerate(kinds):
        operations = ("delta", "conv") if kind == "linear_attention" else ("attention",)
        used = (f"{op} {'/'.join(runner.implementations(index, op))}" for op in operations)
        lines.append(f"layer {index} {kind}: {', '.join(used)}")
    return lines
