"""A model without weights, whose layers are filled from the checkpoint and emptied one at a time.

Names, merged experts and precisions are those of transformers' own loader, which is handed the
tensors of one layer at a time.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from dflash_cache.errors import DataError, UsageError, first_line
from dflash_cache.fp8 import without_quantisation
from dflash_cache.loading import build, build_empty, quiet, tie_head
from dflash_cache.weights import Weights

try:
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
except ImportError:  # a later transformers: the ordinary path needs neither of the two
    convert_and_load_state_dict_in_model = LoadStateDictConfig = None

LATER = "this transformers loads weights in an unknown way; --stream-layers works with 5.17 to 5.24"


def empty_model(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model of a text config with its weights on the meta device.

    Buffers that no checkpoint holds (rotary frequencies) are real, on the CPU. Raises `UsageError`
    if the model cannot be built, or keeps such buffers in its layers.
    """
    config = without_quantisation(copy.deepcopy(config))
    # Without layers and vocabulary a real one costs nothing, and has the real buffers. The list of
    # kinds stays: some models have a rotary embedding for each kind in it.
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 0, 1, None
    try:
        with quiet():
            model = build_empty(config, dtype, trust_remote_code=trust_remote_code)
            shell = build(small, dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, IndexError, AttributeError) as error:
        raise UsageError(
            f"a {config.model_type} model cannot be built without its weights "
            f"({first_line(error)}), so --stream-layers does not work for it"
        ) from error
    _copy_buffers(shell, model)
    return model.eval().requires_grad_(False)


def _copy_buffers(shell: nn.Module, model: nn.Module) -> None:
    """Give `model` the buffers of `shell` that are not saved with the weights."""
    real, saved = dict(shell.named_buffers()), set(model.state_dict())
    for name, _ in list(model.named_buffers()):
        if name in saved:
            continue
        if name not in real:
            raise UsageError(
                f"{type(model).__name__} computes {name} when it is built, so --stream-layers does "
                "not work for it"
            )
        set_buffer(model, name, real[name])


def set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._buffers[leaf] = value


class LayerLoader:
    """Fills and empties the layers of a meta model (see `empty_model`).

    outer: the model's whole config. Construction loads what lies outside of the layers: the
    embedding and the final norm to `device`, the head, which no state needs, to the CPU.
    """

    def __init__(self, model: Any, outer: Any, weights: Weights, device: torch.device):
        if convert_and_load_state_dict_in_model is None or LoadStateDictConfig is None:
            raise UsageError(LATER)
        self.model, self.weights, self.device = model, weights, device
        self.decoder = model.get_decoder()
        self.layers: list[nn.Module] = list(self.decoder.layers)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._prefix = next(n for n, m in model.named_modules() if m is self.decoder.layers) + "."
        self._load_outside(outer)

    def _load_outside(self, outer: Any) -> None:
        model = self.model
        missing = {n for n in self._load(None) if not n.startswith(self._prefix)}
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        self._check(tie_head(model, outer, missing))
        for name, buffer in list(model.named_buffers()):
            if not name.startswith(self._prefix):
                set_buffer(model, name, buffer.to(self.device))
        head = model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight:
            head.to("cpu")
        model.requires_grad_(False)

    def fill(self, layer: int) -> None:
        """Read a layer's weights to the device; `DataError` names what the checkpoint lacks."""
        module = self.layers[layer]
        missing, prefix = self._load(layer), f"{self._prefix}{layer}."
        self._check({name for name in missing if name.startswith(prefix)})
        module.requires_grad_(False)

    def empty(self, layer: int) -> None:
        """Give the layer's memory back."""
        self.layers[layer].to("meta")

    def nbytes(self, layer: int) -> int:
        """Bytes of the layer's weights on the device."""
        return sum(p.numel() * p.element_size() for p in self.layers[layer].parameters())

    def _load(self, group: int | None) -> set[str]:
        """Load one group of tensors; returns the names in the model that it did not give."""
        model, lazy = self.model, self.weights.lazy(self.weights.group(group), self.device)
        settings = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self.dtype,
            dtype_plan=model._get_dtype_plan(self.dtype),
            weight_mapping=get_model_conversion_mapping(model),
        )
        try:
            with quiet():
                info, _ = convert_and_load_state_dict_in_model(model, lazy, settings)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"{LATER} ({first_line(error)})") from error
        wrong = [name for name, *_ in info.mismatched_keys] + list(info.conversion_errors)
        if wrong:
            raise DataError(f"{wrong[0]} of the checkpoint does not have the model's shape")
        return set(info.missing_keys)

    def _check(self, missing: set[str]) -> None:
        if missing:
            folder = next((e.file.parent for e in self.weights.entries.values()), "the model")
            raise DataError(
                f"the weights of {folder} lack {sorted(missing)[0]} ({len(missing)} in all)"
            )
