"""The fused kernels of linear attention: which ones a target needs, imported, or why they are not.

transformers hides a kernel that does not import; here the reason is kept and told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch

from dflash_cache.errors import UsageError, first_line
from dflash_cache.tuning import compile_side_by_side

PIP_FLA = "pip install flash-linear-attention"
# What an import can raise: a missing package, a broken library, a driver that is not there.
IMPORT_ERRORS = (ImportError, RuntimeError, OSError, AttributeError)


@dataclass(frozen=True)
class Rule:
    """A delta rule: its name in fla, and what transformers calls its mixer and its functions.

    `suffix` ends the class name of the mixer; `chunk` and `recurrent` are functions of the modeling
    module.
    """

    name: str
    title: str
    suffix: str
    chunk: str
    recurrent: str


GATED = Rule(
    "gated_delta_rule",
    "GatedDeltaNet",
    "GatedDeltaNet",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
# Kimi Delta Attention: the same rule with a decay for each channel of the keys.
KIMI = Rule(
    "kda",
    "KimiDeltaAttention",
    "DeltaAttention",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
RULES = (GATED, KIMI)


@dataclass(frozen=True)
class Fused:
    """The fused kernels, all imported. `conv(x, weight, bias, activation, rows)`: see packed.py.

    `rule` is the name of the delta rule in fla, `note` what a person should know about the choice.
    """

    chunk: Callable
    recurrent: Callable
    conv: Callable
    conv_name: str
    rule: str = GATED.name
    note: str = ""


@cache
def import_fused(rule: Rule = GATED) -> Fused:
    """Import the kernels of a rule; raises one of `IMPORT_ERRORS`, as the import itself does."""
    fla = import_module(f"fla.ops.{rule.name}")
    chunk, recurrent = (
        getattr(fla, f"{kind}_{rule.name}") for kind in ("chunk", "fused_recurrent")
    )
    compile_side_by_side()
    return Fused(chunk, recurrent, *_load_conv(), rule=rule.name, note=conv_note())


def why_missing(rule: Rule = GATED) -> str | None:
    """The first line of what the import of the fused kernels raises; None if they import."""
    try:
        import_fused(rule)
    except IMPORT_ERRORS as error:
        return first_line(error)
    return None


def load_fused(rule: Rule = GATED) -> Fused:
    """Import the fused kernels; `UsageError` names what is missing and both ways out."""
    why = why_missing(rule)
    if why is not None:
        raise UsageError(
            f"the target has {rule.title} layers, whose fused kernel does not import ({why}): "
            f"{PIP_FLA}, or run the torch reference instead, several times slower, with "
            "--allow-slow (extract) or --device cpu"
        )
    return import_fused(rule)


def conv_note() -> str:
    """Why the convolution is not causal-conv1d's; empty if it is."""
    try:
        import_module("causal_conv1d").causal_conv1d_fn  # noqa: B018
    except IMPORT_ERRORS as error:
        return f"causal-conv1d does not import ({first_line(error)})"
    return ""


def _load_conv() -> tuple[Callable, str]:
    if not conv_note():
        return _cuda_conv(import_module("causal_conv1d").causal_conv1d_fn), "causal_conv1d"
    # The same in Triton, which needs no compiler to install.
    return _triton_conv(import_module("fla.modules.causal_conv1d").causal_conv1d), TRITON_CONV


TRITON_CONV = "fla.causal_conv1d"


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


def fused_for(
    device: torch.device, kinds: Sequence[str], allow_slow: bool = False, rule: Rule | None = None
) -> Fused | None:
    """The fused kernels if this device and these layers need them, else None (the reference).

    With `allow_slow` None as well where they are needed and do not import; else a `UsageError`.
    """
    rule = rule or GATED
    if device.type != "cuda" or "linear_attention" not in kinds:
        return None
    if allow_slow and why_missing(rule) is not None:
        return None
    return load_fused(rule)
