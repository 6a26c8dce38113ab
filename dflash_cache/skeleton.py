"""A target's modules without its weights: what a config alone tells of the layers."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dflash_cache.errors import UsageError, first_line
from dflash_cache.families import SUPPORTED, Structure, check_settings, inspect_layers
from dflash_cache.fp8 import without_quantisation
from dflash_cache.kernels import ATTENTION
from dflash_cache.loading import layer_kinds, quiet

# What a model's constructor raises for a config that does not hold together.
BUILD_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError
)  # fmt: skip


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model; `UsageError` if it has no such list."""
    layers: Any = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(f"{type(model).__name__} has no list of decoder layers; {SUPPORTED}")
    return layers


def check_structure(config: Any, *, trust_remote_code: bool = False) -> Structure:
    """What the layers of a text config are made of; `UsageError` if one of them cannot be run.

    The model is built on the meta device: no weights are read, nothing is allocated.
    """
    kinds = layer_kinds(config)
    check_settings(config)
    plain = without_quantisation(copy.deepcopy(config))
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                plain, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
            )
    except BUILD_ERRORS as error:
        raise UsageError(
            f"transformers cannot build this {config.model_type} ({first_line(error)}); {SUPPORTED}"
        ) from error
    structure = inspect_layers(list(decoder_layers(model)), kinds)
    # The cache holds a copy of it.
    if getattr(getattr(model.get_decoder(), "norm", None), "weight", None) is None:
        raise UsageError(f"{type(model).__name__} has no final norm with a weight; {SUPPORTED}")
    return structure
