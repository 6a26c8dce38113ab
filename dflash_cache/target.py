"""The target model: loaded, cut after the last tap, its taps hooked, run on packed rows."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.compiled import compile_layers, explaining
from dflash_cache.fp8 import DEQUANTISED, fp8_blocks
from dflash_cache.fused import Fused, fused_for
from dflash_cache.identity import model_folder, target_identity
from dflash_cache.kernels import (
    Runner,
    bind_layers,
    check_layers,
    describe,
    running,
)
from dflash_cache.loading import (
    check_fits,
    cut_config,
    layer_kinds,
    load_config,
    load_model,
    open_weights,
)
from dflash_cache.packed import PackedRows
from dflash_cache.skeleton import check_structure, decoder_layers
from dflash_cache.taps import DEFAULT_TAPS, check_taps, default_taps


@dataclass(frozen=True)
class FrozenWeights:
    """embed [V, D]; head [V, D], the very same tensor if tied; norm [D], as stored."""

    embed: Tensor
    head: Tensor
    norm: Tensor

    @property
    def tied(self) -> bool:
        return self.head is self.embed


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded: the whole config, its text config, the text config to load, taps."""

    outer: Any
    config: Any
    cut: Any
    taps: tuple[int, ...]

    @staticmethod
    def of(
        model: str,
        taps: Sequence[int] | None,
        device: str,
        *,
        full: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
        allow_slow: bool = False,
    ) -> "Wanted":
        """Read the config and check the taps, the layers and the kernels, before a long load."""
        outer = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
        config = outer.get_text_config()
        layers = config.num_hidden_layers
        taps = default_taps(layers, min(DEFAULT_TAPS, layers)) if taps is None else taps
        taps = check_taps(taps, layers)
        kinds = layer_kinds(config)
        cut = copy.deepcopy(config) if full else cut_config(config, taps[-1] + 1)
        rule = check_structure(cut, trust_remote_code=trust_remote_code).rule
        fused_for(torch.device(device), kinds[: cut.num_hidden_layers], allow_slow, rule)
        return Wanted(outer, config, cut, taps)


class Target:
    """A loaded target. `config` is the text config of the whole model, whatever was loaded."""

    def __init__(
        self,
        name: str,
        model: Any,
        config: Any,
        taps: tuple[int, ...],
        device: torch.device,
        allow_slow: bool = False,
    ):
        self.name, self.model, self.config = name, model, config
        self.taps, self.device = taps, device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.revision: str | None = None
        self.stored_dtype: torch.dtype | None = None
        # Of the weights as they were loaded, for a person; `dtype` is what they are now.
        self.precision = str(self.dtype).removeprefix("torch.")
        self.decoder, layers = model.get_decoder(), decoder_layers(model)
        self.kinds = layer_kinds(config)[: len(layers)]
        self.rule = bind_layers(list(layers), self.kinds).rule
        self.fused: Fused | None = fused_for(device, self.kinds, allow_slow, self.rule)
        self.last_runner: Runner | None = None
        self._sink: Tensor | None = None
        self.compiled = False
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
        allow_slow: bool = False,
    ) -> "Target":
        """Load a target from a folder or the hub.

        taps: increasing 0-based layer ids, None for five default ones. Without `full` only the
        layers up to the last tap are loaded and run; decoding needs all. `allow_slow`: without
        fused kernels the torch reference may run on CUDA. Raises `UsageError` for a missing model,
        an unsupported family, a tap out of range or missing kernels, `DataError` for a checkpoint
        that lacks weights.
        """
        where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        wanted = Wanted.of(model, taps, device, full=full, allow_slow=allow_slow, **where)
        weights = open_weights(model, wanted.outer, revision)
        check_fits(weights, wanted.cut.num_hidden_layers, dtype, torch.device(device))
        loaded = load_model(model, wanted.outer, wanted.cut, dtype=dtype, **where)
        place = torch.device(device)
        target = Target(
            model, loaded.to(place), wanted.config, wanted.taps, place, allow_slow=allow_slow
        )
        target.remember(wanted, revision)
        return target

    def remember(self, wanted: Wanted, revision: str | None) -> None:
        """Where the weights came from, and in which precision they were stored."""
        self.revision = getattr(wanted.outer, "_commit_hash", None) or revision
        stored = wanted.config.dtype
        self.stored_dtype = stored if isinstance(stored, torch.dtype) else None
        if fp8_blocks(self.name, wanted.outer) is not None:
            self.precision = DEQUANTISED

    def compile(self) -> None:
        """Compile the layers from here on; see `selfcheck.prove_compiled`."""
        compile_layers(list(decoder_layers(self.model)))
        self.compiled = True

    @property
    def one_shape(self) -> bool:
        """Whether a short batch had best be filled up: kernels are made for each shape."""
        return self.compiled or self.device.type == "cuda"

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
            with running(runner), explaining():
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

    def run_many(
        self,
        batches: Sequence[tuple[Tensor, Tensor, Tensor]],
        *,
        fused: bool = True,
        between: Callable[[], object] = lambda: None,
    ) -> list[Tensor]:
        """`run_rows` of each (input_ids, document, position); what `between` raises stops it."""
        states = []
        for batch in batches:
            states.append(self.run_rows(*batch, fused=fused))
            between()
        return states

    def batches_at_once(self, batch_rows: int, seq_len: int) -> int:
        """How many batches `run_many` had best be given: more than one only if it pays."""
        return 1

    def forecast(self, rows: int, batch_rows: int, seq_len: int) -> list[str]:
        """Costs of running `rows` rows that a person should know beforehand."""
        return []

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
        # Gemma scales within its embedding module: what the first layer gets is no longer the head.
        scale = getattr(embed, "embed_scale", None)
        return FrozenWeights(
            weights if scale is None else weights * torch.as_tensor(scale).to(weights),
            weights if tied else head.weight.detach().to(dtype),
            self.decoder.norm.weight.detach().to(dtype),
        )

    def describe_kernels(self) -> list[str]:
        """A headline, then one line per layer: what computed its mixer in the last run."""
        return describe(self.kinds, self.fused, self.device, self.last_runner, self.rule)
