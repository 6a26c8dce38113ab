"""A target that is larger than the GPU: its layers pass through it one after the other.

A macro-batch of rows goes through layer 0, then layer 1, and so on; each layer's weights are read
once per macro-batch. The states are those of `Target`, to the bit: every layer gets the arguments
that the decoder's own forward gives it (see `StandIn`).
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.errors import UsageError
from dflash_cache.hostmem import free_host_memory, processes_here
from dflash_cache.kernels import Runner, check_layers, running
from dflash_cache.layerwise import LayerLoader, empty_model
from dflash_cache.loading import free_memory, open_weights
from dflash_cache.packed import PackedRows
from dflash_cache.progress import progress
from dflash_cache.target import Target, Wanted

# A macro-batch takes this part of the free host memory; hidden states stay on the GPU between
# layers if they take no more than this part of its free memory.
SHARE = 4


class StandIn(nn.Module):
    """Takes a layer's place in the decoder's forward, which then computes masks and rotary
    embeddings but no layers.

    While `active` it runs the layer with the arguments that the forward gives it, on `hidden`
    instead of the hidden states (None: on what the forward gives, the embedding), and keeps the
    `output`. What it returns is what it was given; `UsageError` if the forward changes that before
    the next layer, which this layer-by-layer run would not notice otherwise.
    """

    def __init__(self, layer: nn.Module, before: "StandIn | None"):
        super().__init__()
        # Not as submodules: the layer belongs to the decoder.
        self.__dict__["layer"], self.__dict__["before"] = layer, before
        self.active = False
        self.hidden: Tensor | None = None
        self.output: Tensor | None = None
        self.passed: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before: StandIn | None = self.__dict__["before"]
        if before is not None and before.passed is not hidden_states:
            raise UsageError(
                f"the decoder of {type(self.layer).__name__} works on the hidden states between "
                "its layers, so --stream-layers does not work for it"
            )
        if self.active:
            given = hidden_states if self.hidden is None else self.hidden
            output = self.layer(given, *args, **kwargs)
            self.output = output[0] if isinstance(output, tuple) else output
        self.passed = hidden_states
        return hidden_states

    def forget(self) -> None:
        """Drop what the last run left."""
        self.active, self.hidden, self.output, self.passed = False, None, None, None


def stand_ins(layers: Sequence[nn.Module]) -> nn.ModuleList:
    made: list[StandIn] = []
    for layer in layers:
        made.append(StandIn(layer, made[-1] if made else None))
    return nn.ModuleList(made)


@dataclass
class Part:
    """One batch of a macro-batch: ids, position [B, S] on the CPU; `states` [B, S, T, D] on the
    CPU; `hidden` [B, S, D], the input of the next layer, None before the first."""

    ids: Tensor
    position: Tensor
    runner: Callable[[], Runner]
    states: Tensor
    hidden: Tensor | None = None


class StreamedTarget(Target):
    """As `Target`, for weights that do not fit on the device; gives states, no logits.

    `macro_rows`: rows of a macro-batch, None for as many as fit in a quarter of the free host
    memory. `quiet`: without a progress bar.
    """

    def __init__(self, *args: Any, loader: LayerLoader, macro_rows: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loader, self.macro_rows = loader, macro_rows
        # Asked once, so that what is forecast is what is done.
        self.host_bytes = free_host_memory() // SHARE // processes_here()
        self.quiet = False
        self._stand_ins = stand_ins(loader.layers)

    @staticmethod
    def stream(
        model: str,
        *,
        taps: Sequence[int] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        macro_rows: int | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        allow_slow: bool = False,
    ) -> "StreamedTarget":
        """Open a target; only its embedding, final norm and head are loaded.

        Arguments and errors are those of `Target.load`; `UsageError` as well for a model whose
        layers cannot be separated, or one layer of which does not fit on the device.
        """
        code = {"trust_remote_code": trust_remote_code}
        wanted = Wanted.of(model, taps, device, revision=revision, allow_slow=allow_slow, **code)
        weights = open_weights(model, wanted.outer, revision)
        empty = empty_model(wanted.cut, dtype, **code)
        place = torch.device(device)
        loader = LayerLoader(empty, wanted.outer, weights, place)
        _check_layer_fits(loader, free_memory(place))
        about = (model, empty, wanted.config, wanted.taps, place, allow_slow)
        target = StreamedTarget(*about, loader=loader, macro_rows=macro_rows)
        target.remember(wanted, revision)
        return target

    @torch.no_grad()
    def forward(
        self,
        runner: Runner,
        input_ids: Tensor,
        position: Tensor,
        *,
        logits_to_keep: int | None = None,
    ) -> tuple[Tensor, None]:
        """input_ids, position [B, L] -> states [B, L, T, D]; one pass over the checkpoint."""
        if logits_to_keep is not None:
            raise UsageError("a target that is streamed layer by layer gives no logits")
        part = self._part(input_ids, position, lambda: runner)
        self._stream([part], Runner(), lambda: None)
        return part.states.to(self.device), None

    def run_rows(
        self, input_ids: Tensor, document: Tensor, position: Tensor, *, fused: bool = True
    ) -> Tensor:
        """As `Target.run_rows`; one pass over the checkpoint."""
        return self.run_many([(input_ids, document, position)], fused=fused)[0].to(self.device)

    @torch.no_grad()
    def run_many(
        self,
        batches: Sequence[tuple[Tensor, Tensor, Tensor]],
        *,
        fused: bool = True,
        between: Callable[[], object] = lambda: None,
    ) -> list[Tensor]:
        """(input_ids, document, position) of each batch, [B, S] -> its states [B, S, T, D], on the
        CPU; all of them in one pass over the checkpoint. `between` is called after every batch of
        every layer; what it raises ends the pass."""
        kernels, ledger = self.fused if fused else None, Runner()
        parts = [
            self._part(ids, position, partial(PackedRows, document, self.device, kernels))
            for ids, document, position in batches
        ]
        self._stream(parts, ledger, between)
        if kernels is not None or any(bool(document.any()) for _, document, _ in batches):
            check_layers(ledger, self.kinds, kernels)
        self.last_runner = ledger
        return [part.states for part in parts]

    def batches_at_once(self, batch_rows: int, seq_len: int) -> int:
        """Batches of `batch_rows` rows that make up a macro-batch."""
        rows = self.macro_rows
        if rows is None:
            rows = self.host_bytes // self._row_bytes(seq_len)
        return max(1, rows // batch_rows)

    def forecast(self, rows: int, batch_rows: int, seq_len: int) -> list[str]:
        """What running `rows` rows costs, for a person, before it begins."""
        at_once = min(self.batches_at_once(batch_rows, seq_len) * batch_rows, rows)
        passes = -(-rows // max(at_once, 1))
        layers, weights = len(self.kinds), self.loader.weights
        read = sum(weights.nbytes(i) for i in range(layers)) / 2**30
        return [
            f"stream-layers: {passes:,} pass{'es' if passes > 1 else ''} over {layers} layers; "
            f"a pass reads {read:,.2f} GiB of weights ({passes * read:,.1f} GiB in all) for "
            f"{at_once:,} rows ({at_once * seq_len:,} tokens) and takes "
            f"{at_once * self._row_bytes(seq_len) / 2**30:,.2f} GiB of host memory"
        ]

    def _row_bytes(self, seq_len: int) -> int:
        """Host memory of a row: its states, and what passes from layer to layer."""
        return seq_len * (len(self.taps) + 1) * self.hidden * self.dtype.itemsize

    def _part(self, ids: Tensor, position: Tensor, runner: Callable[[], Runner]) -> Part:
        states = torch.empty(*ids.shape, len(self.taps), self.hidden, dtype=self.dtype)
        return Part(ids, position, runner, states)

    def _stream(self, parts: list[Part], ledger: Runner, between: Callable[[], object]) -> None:
        """All parts through all layers; what computed their mixers is added up in `ledger`."""
        layers, place = len(self.kinds), self._place(parts)
        hidden = io.StringIO() if self.quiet else None
        with progress(layers * len(parts), "stream", "batches x layers", hidden) as bar:
            for index in range(layers):
                self.loader.fill(index)
                self.loader.weights.hint((index + 1) % layers)
                try:
                    for part in parts:
                        output = self._run(index, part, ledger)
                        part.hidden = _keep(output, part.hidden, place)
                        bar.advance()
                        between()
                finally:
                    self.loader.empty(index)

    def _place(self, parts: list[Part]) -> torch.device:
        """Where hidden states wait for the next layer: on the device, unless they are too many."""
        free = free_memory(self.device)
        need = sum(p.ids.numel() for p in parts) * self.hidden * self.dtype.itemsize
        return self.device if free is None or need <= free // SHARE else torch.device("cpu")

    def _run(self, index: int, part: Part, ledger: Runner) -> Tensor:
        """One layer of one part -> [B, S, D]; its tap, if it is one, goes to `part.states`."""
        ids, position = (x.to(self.device, torch.long) for x in (part.ids, part.position))
        hidden = part.hidden
        stand_in = self._stand_ins[index]
        stand_in.hidden = None if hidden is None else hidden.to(self.device, non_blocking=True)
        stand_in.active, self._sink = True, part.states
        try:
            with self._without_layers(), running(part.runner()) as runner:
                self.decoder(input_ids=ids, position_ids=position, use_cache=False)
            output = stand_in.output
        finally:
            self._sink = None
            for each in self._stand_ins:
                each.forget()
        if output is None:
            raise UsageError(f"{type(self.decoder).__name__} did not run its layer {index}")
        ledger.counts.update(runner.counts)
        ledger.windows.update(runner.windows)
        return output

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        layers = self.decoder.layers
        self.decoder.layers = self._stand_ins
        try:
            yield
        finally:
            self.decoder.layers = layers


def _keep(output: Tensor, kept: Tensor | None, place: torch.device) -> Tensor:
    """A layer's output where it waits for the next one; on the host in memory that is reused."""
    if output.device == place:
        return output
    if kept is None:
        kept = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    # In the order of the stream: the next layer's copy back comes after this one.
    return kept.copy_(output, non_blocking=True)


def _check_layer_fits(loader: LayerLoader, free: int | None) -> None:
    """Experts that are merged, two matrices in one, lie there three times for a moment."""
    largest = max(loader.nbytes(i) for i in range(len(loader.layers)))
    if free is not None and 3 * largest > free:
        raise UsageError(
            f"even one layer of the target ({largest / 2**30:.1f} GiB, up to three times while it "
            "is loaded) "
            f"does not fit in the {free / 2**30:.1f} GiB that are free on {loader.device}; "
            "free memory there, or use --device cpu"
        )
