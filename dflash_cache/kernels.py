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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_cache import compiled
from dflash_cache.errors import UsageError
from dflash_cache.families import SUPPORTED, Structure, inspect_layers
from dflash_cache.fused import GATED, PIP_FLA, Fused, Rule, why_missing

# Not a name with "flash" in it: transformers would look for a flash-attention package.
ATTENTION = "document_attention"
REFERENCE = "torch reference"
BOUND = "dflash_original"
# Arguments of attention functions that change the result and that we do not compute.
REFUSED = ("softcap", "s_aux", "position_bias")


class Runner:
    """Computes the token mixers of the layer that runs now (`layer`), and counts what it used."""

    def __init__(self) -> None:
        self.layer = -1
        self.counts: Counter[tuple[int, str, str]] = Counter()
        self.windows: dict[int, int | None] = {}  # of the attention layers that ran

    def count(self, operation: str, implementation: str) -> None:
        self.counts[self.layer, operation, implementation] += 1

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """x [B, C, L], weight [C, W] -> [B, C, L]."""
        raise UsageError(f"{type(self).__name__} runs no linear-attention layers")

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k [B, L, Hk, dk], v [B, L, Hv, dv], beta [B, L, Hv] -> [B, L, Hv, dv].

        g, the log of the decay, is [B, L, Hv], or [B, L, Hv, dk] where every channel has its own.
        """
        raise UsageError(f"{type(self).__name__} runs no linear-attention layers")

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


def _current() -> Runner:
    if not _active:
        raise UsageError("a compiled target runs only through dflash_cache.target.Target")
    return _active[-1]


compiled.connect(_current)


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
    refused = [name for name in REFUSED if kwargs.get(name) is not None]
    if refused or getattr(module, "is_causal", True) is False:
        why = f"uses {refused[0]}" if refused else "is not causal"
        raise UsageError(f"the attention of {type(module).__name__} {why}; {SUPPORTED}")
    if torch.compiler.is_compiling():
        return compiled.attend(query, key, value, scaling, sliding_window), None
    if not _active:
        raise UsageError(f"attention {ATTENTION!r} works only through dflash_cache.target.Target")
    runner = _active[-1]
    runner.windows[runner.layer] = sliding_window
    output = runner.attend(query, key, value, scaling, sliding_window)  # [B, H, L, h]
    return output.transpose(1, 2).contiguous(), None


# Without an entry of this name among its mask functions, transformers builds no mask at all.
AttentionInterface.register(ATTENTION, _attention)


def _conv(original: Callable) -> Callable:
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        if torch.compiler.is_compiling():
            return compiled.conv(hidden_states, weight, bias, activation)
        if not _active:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        return _active[-1].conv(hidden_states, weight, bias, activation)

    return causal_conv1d_fn


def _delta(original: Callable) -> Callable:
    def chunk_delta_rule(query, key, value, g, beta, **kwargs):
        if not torch.compiler.is_compiling() and not _active:
            return original(query, key, value, g=g, beta=beta, **kwargs)
        if not kwargs.get("use_qk_l2norm_in_kernel") or kwargs.get("initial_state") is not None:
            raise UsageError(
                f"this transformers calls the delta rule in an unknown way; {SUPPORTED}"
            )
        if torch.compiler.is_compiling():
            return compiled.delta(query, key, value, g, beta), None
        return _active[-1].delta(query, key, value, g, beta), None

    return chunk_delta_rule


def _unused(original: Callable) -> Callable:
    """The functions of cached decoding; we run targets without transformers' cache."""

    def guarded(*args, **kwargs):
        if not _active:
            return original(*args, **kwargs)
        raise UsageError(f"this transformers decodes in an unknown way; {SUPPORTED}")

    return guarded


def dispatchers(rule: Rule = GATED) -> dict[str, Callable]:
    """For each function of a modeling module with this delta rule, what makes our own of it."""
    return {
        "causal_conv1d_fn": _conv,
        rule.chunk: _delta,
        "causal_conv1d_update": _unused,
        rule.recurrent: _unused,
    }


def bind(module: ModuleType, rule: Rule = GATED) -> None:
    """Replace the mixers of a modeling module; once per module, calling it again does nothing."""
    replaced = dispatchers(rule)
    missing = [name for name in replaced if not hasattr(module, name)]
    if missing:
        raise UsageError(f"{module.__name__} has no {missing[0]}, so it cannot be run; {SUPPORTED}")
    for name, dispatcher in replaced.items():
        original = getattr(module, name)
        if not hasattr(original, BOUND):
            bound = dispatcher(original)
            setattr(bound, BOUND, original)
            setattr(module, name, bound)


def bind_layers(layers: Sequence[nn.Module], kinds: Sequence[str]) -> Structure:
    """Bind what the layers use, and have each one announce itself when it runs."""
    structure = inspect_layers(layers, kinds)
    for index, (layer, mixer) in enumerate(zip(layers, structure.mixers, strict=True)):
        if structure.rule is not None and kinds[index] == "linear_attention":
            bind(sys.modules[type(mixer).__module__], structure.rule)
        layer.register_forward_pre_hook(lambda *_, index=index: enter_layer(index))
    return structure


def check_layers(runner: Runner, kinds: Sequence[str], fused: Fused | None) -> None:
    """`UsageError` unless every layer's mixer ran through `runner`, fused where it has to be."""
    for index, kind in enumerate(kinds):
        for operation in _operations(kind):
            used = runner.implementations(index, operation)
            if not used:
                raise UsageError(f"layer {index} ({kind}) ran outside of our control; {SUPPORTED}")
            if fused is not None and operation == "delta" and REFERENCE in used:
                raise UsageError(
                    f"layer {index} ran the slow {REFERENCE}, not a fused kernel; {PIP_FLA}"
                )
        # Some models keep the window in their mask alone, and we let them build none.
        if kind == "sliding_attention" and runner.windows.get(index) is None:
            raise UsageError(f"layer {index} ({kind}) does not tell its window; {SUPPORTED}")


def _operations(kind: str) -> tuple[str, ...]:
    return ("delta", "conv") if kind == "linear_attention" else ("attention",)


def describe(
    kinds: Sequence[str],
    fused: Fused | None,
    device: torch.device,
    runner: Runner | None,
    rule: Rule | None = None,
) -> list[str]:
    """A headline, then one line per layer: what computed its mixer while `runner` was active."""
    lines = [f"kernels: {_headline(kinds.count('linear_attention'), fused, device, rule or GATED)}"]
    if runner is None:
        return lines
    for index, kind in enumerate(kinds):
        used = (f"{op} {'/'.join(runner.implementations(index, op))}" for op in _operations(kind))
        lines.append(f"layer {index} {kind}: {', '.join(used)}")
    return lines


def _headline(linear: int, fused: Fused | None, device: torch.device, rule: Rule) -> str:
    if not linear:
        return f"sdpa on {device.type.upper()} (no {rule.title} layers)"
    layers = f"({linear} {rule.title} layers)"
    if fused is not None:
        note = f"; {fused.note}" if fused.note else ""
        return f"fla.chunk_{fused.rule}, {fused.conv_name} {layers}{note}"
    plain = f"{REFERENCE} on {device.type.upper()} {layers}"
    if device.type == "cpu":
        return plain
    why = why_missing(rule) or "they were not asked for"
    return f"SLOW {plain}, because there are no fused kernels ({why}); {PIP_FLA}"
