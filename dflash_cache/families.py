"""Which decoder layers can be run, judged by the modules that a model is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dflash_cache.errors import UsageError
from dflash_cache.fused import RULES, Rule

SUPPORTED = (
    "supported are full- and sliding-attention models of transformers that go through its "
    "attention interface (qwen3, llama, mistral, gemma3 ...), and the delta-rule hybrids "
    "qwen3_next, qwen3_5, qwen3_5_moe and kimi_linear"
)
# Settings of a text config that change what a layer computes in a way that we do not follow.
REFUSED_SETTINGS = {
    "num_kv_shared_layers": "shares keys and values between layers",
    "altup_num_inputs": "carries several hidden states from layer to layer",
    "hidden_size_per_layer_input": "feeds every layer an embedding of its own",
}
# Attributes of attention modules that change the result and that we do not compute.
REFUSED_ATTRIBUTES = {
    "attn_logit_softcapping": "uses softcap",
    "sinks": "has attention sinks",
}


@dataclass(frozen=True)
class Structure:
    """`mixers[i]` is what mixes tokens in layer i; `rule` is that of the linear ones, if any."""

    mixers: list[nn.Module]
    rule: Rule | None

    @property
    def names(self) -> list[str]:
        """The class name of each layer's mixer."""
        return [type(mixer).__name__ for mixer in self.mixers]


def rule_of(module: nn.Module) -> Rule | None:
    """The delta rule that a module computes, by the name of its class."""
    name = type(module).__name__
    return next((rule for rule in RULES if name.endswith(rule.suffix)), None)


def check_settings(config: Any) -> None:
    """`UsageError` if a text config asks for what no layer can show."""
    for name, what in REFUSED_SETTINGS.items():
        if getattr(config, name, None):
            raise UsageError(f"this {config.model_type} {what} ({name}); {SUPPORTED}")


def inspect_layers(layers: Sequence[nn.Module], kinds: Sequence[str]) -> Structure:
    """The mixers of decoder layers; `UsageError` naming the first that cannot be run.

    Only modules are looked at, so a model on the meta device will do.
    """
    found = [find_mixer(i, x, k) for i, (x, k) in enumerate(zip(layers, kinds, strict=True))]
    rules = {rule_of(m) for m, kind in zip(found, kinds, strict=True) if kind == "linear_attention"}
    if len(rules) > 1:
        raise UsageError(f"the target mixes several delta rules; {SUPPORTED}")
    return Structure(found, next(iter(rules), None))


def find_mixer(index: int, layer: nn.Module, kind: str) -> nn.Module:
    """The one module of a layer that mixes tokens; `UsageError` if we cannot compute it."""
    if kind == "linear_attention":
        mixers = [m for m in layer.modules() if rule_of(m) is not None]
    else:
        mixers = [m for m in layer.modules() if type(m).__name__.endswith("Attention")]
    if len(mixers) != 1 or (kind != "linear_attention" and rule_of(mixers[0]) is not None):
        raise UsageError(
            f"layer {index} ({kind}) mixes tokens with {_candidate(layer)}, which is not "
            f"supported; {SUPPORTED}"
        )
    if kind != "linear_attention":
        _check_attention(index, mixers[0])
    return mixers[0]


def _check_attention(index: int, mixer: nn.Module) -> None:
    name = type(mixer).__name__
    why = [
        what for attribute, what in REFUSED_ATTRIBUTES.items()
        if getattr(mixer, attribute, None) is not None
    ]  # fmt: skip
    if getattr(mixer, "is_causal", True) is False:
        why.append("is not causal")
    if why:
        raise UsageError(f"layer {index}: the attention of {name} {why[0]}; {SUPPORTED}")


def _candidate(layer: nn.Module) -> str:
    """The class name of what most likely mixes tokens in a layer, for a person to read."""
    names = [type(child).__name__ for child in layer.children()]
    names = [name for name in names if "norm" not in name.lower()]
    words = ("mamba", "mixer", "recurrent", "attention", "conv")
    likely = [n for word in words for n in names if word in n.lower()]
    return (likely or [type(layer).__name__])[0]
