"""The target model: loaded, cut after the last tap, its taps hooked, run on packed rows."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.errors import UsageError
from dflash_cache.identity import model_folder, target_identity
from dflash_cache.kernels import (
    SUPPORTED,
    Fused,
    Runner,
    bind_layers,
    check_layers,
    describe,
    fused_for,
    running,
)
from dflash_cache.loading import cut_config, layer_kinds, load_config, load_model
from dflash_cache.packed import PackedRows

DEFAULT_TAPS = 5


def default_taps(layers: int, n: int = DEFAULT_TAPS) -> tuple[int, ...]:
    """z-lab's choice: `round(1 + i (N-4) / (n-1))`, N//2 for one tap; spread evenly if N is small.

    A tap is the 0-based id of a decoder layer whose output is taken.
    """
    if not 1 <= n <= layers:
        raise UsageError(f"{n} taps do not fit a target of {layers} layers; choose 1..{layers}")
    if n == 1:
        return (layers // 2,)
    taps = tuple(round(1 + i * (layers - 4) / (n - 1)) for i in range(n))
    if taps[0] < taps[-1] and len(set(taps)) == n:
        return taps
    return tuple(i * (layers - 1) // (n - 1) for i in range(n))


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """`"1,8,15"` -> (1, 8, 15); None, "" and "auto" -> None, the default taps."""
    if text is None or text.strip() in ("", "auto"):
        return None
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"taps {text!r} are not whole numbers separated by commas") from None
    return taps


def check_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """`UsageError` unless the taps are increasing layer ids of a target of `layers` layers."""
    wrong = [t for t in taps if not 0 <= t < layers]
    if wrong:
        raise UsageError(
            f"tap {wrong[0]} does not exist: the target has {layers} layers, so taps lie in "
            f"0..{layers - 1}"
        )
    if not taps or list(taps) != sorted(set(taps)):
        raise UsageError(f"taps {list(taps)} must be given in increasing order, each one once")
    return tuple(int(t) for t in taps)


@dataclass(frozen=True)
class FrozenWeights:
    """embed [V, D]; head [V, D], the very same tensor if tied; norm [D], as stored."""

    embed: Tensor
    head: Tensor
    norm: Tensor

    @property
    def tied(self) -> bool:
        return self.head is self.embed


class Target:
    """A loaded target. `config` is the text config of the whole model, whatever was loaded."""

    def __init__(
        self, name: str, model: Any, config: Any, taps: tuple[int, ...], device: torch.device
    ):
        self.name, self.model, self.config = name, model, config
        self.taps, self.device = taps, device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.revision: str | None = None
        self.stored_dtype: torch.dtype | None = None
        self.decoder = model.get_decoder()
        layers: Any = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise UsageError(f"{type(model).__name__} has no list of decoder layers; {SUPPORTED}")
        self.kinds = layer_kinds(config)[: len(layers)]
        self.fused: Fused | None = fused_for(device, self.kinds)
        bind_layers(list(layers), self.kinds)
        self.last_runner: Runner | None = None
        self._sink: Tensor | None = None
        for slot, tap in enumerate(taps):
            layers[tap].register_forward_hook(self._tap(slot))

    @staticmethod
    def load(
        model: str,
        *,
        taps: Sequence[int] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        full: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> "Target":
        """Load a target from a folder or the hub.

        taps: increasing 0-based layer ids, None for five default ones. Without `full` only the
        layers up to the last tap are loaded and run; decoding needs all. Raises `UsageError` for a
        missing model, an unsupported family, a tap out of range or missing kernels, `DataError`
        for a checkpoint that lacks weights.
        """
        outer = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
        config = outer.get_text_config()
        layers = config.num_hidden_layers
        taps = default_taps(layers, min(DEFAULT_TAPS, layers)) if taps is None else taps
        taps = check_taps(taps, layers)
        kinds = layer_kinds(config)
        wanted = copy.deepcopy(config) if full else cut_config(config, taps[-1] + 1)
        fused_for(torch.device(device), kinds[: wanted.num_hidden_layers])  # before a long load
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
        loaded = load_model(
            model,
            outer,
            wanted,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        target = Target(model, loaded.to(device), config, taps, torch.device(device))
        target.revision = getattr(outer, "_commit_hash", None) or revision
        target.stored_dtype = stored
        return target

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model; `len(kinds)` of them are loaded."""
        return self.config.num_hidden_layers

    def _tap(self, slot: int) -> Callable:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._sink is not None:
                self._sink[:, :, slot] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.no_grad()
    def forward(
        self,
        runner: Runner,
        input_ids: Tensor,
        position: Tensor,
        *,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """input_ids, position [B, L] -> states [B, L, T, D], logits [B, n, V] or None.

        `logits_to_keep`: None for no logits, 0 for those of all tokens, n for the last n.
        """
        ids, position = (x.to(self.device, torch.long) for x in (input_ids, position))
        arguments: dict[str, Any] = {"position_ids": position, "use_cache": False}
        if logits_to_keep is not None:
            arguments["logits_to_keep"] = logits_to_keep
        sink = torch.empty(
            *ids.shape, len(self.taps), self.hidden, dtype=self.dtype, device=self.device
        )
        self._sink = sink
        try:
            with running(runner):
                module = self.decoder if logits_to_keep is None else self.model
                output = module(input_ids=ids, **arguments)
        finally:
            self._sink = None
        return sink, None if logits_to_keep is None else output.logits

    def run_rows(
        self, input_ids: Tensor, document: Tensor, position: Tensor, *, fused: bool = True
    ) -> Tensor:
        """Packed rows -> states [B, S, T, D] in the model's dtype; states of padding mean nothing.

        input_ids, position [B, S]; document [B, S], 0 = padding, best on the CPU. A document's
        states are those of the document alone. `fused=False` forces the torch reference.
        """
        kernels = self.fused if fused else None
        runner = PackedRows(document, self.device, kernels)
        states, _ = self.forward(runner, input_ids, position)
        if runner.documents or kernels is not None:
            check_layers(runner, self.kinds, kernels)
        self.last_runner = runner
        return states

    def identity(self) -> dict[str, Any]:
        """What binds a cache to this target: names and digests, JSON values only."""
        folder = model_folder(self.name, self.revision)
        return target_identity(
            self.name, folder, self.revision, self.dtype, type(self.model).__name__
        )

    def frozen(self) -> FrozenWeights:
        """The parts that a drafter shares, in the dtype of the checkpoint if that is narrower."""
        embed, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        half = self.stored_dtype in (torch.bfloat16, torch.float16)
        dtype = self.stored_dtype if half and self.dtype == torch.float32 else self.dtype
        weights = embed.weight.detach().to(dtype)
        tied = head.weight is embed.weight
        return FrozenWeights(
            weights,
            weights if tied else head.weight.detach().to(dtype),
            self.decoder.norm.weight.detach().to(dtype),
        )

    def describe_kernels(self) -> list[str]:
        """A headline, then one line per layer: what computed its mixer in the last run."""
        return describe(self.kinds, self.fused, self.device, self.last_runner)
