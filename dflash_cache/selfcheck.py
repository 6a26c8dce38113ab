"""Prove, on the machine at hand, that every document gets its own states, from the right kernels.

Two proofs, before the first shard is written. Fused kernels equal the torch reference, operation by
operation. And a document alone has the states that it has when packed with others, layer by layer.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_cache.errors import UsageError
from dflash_cache.fused import Fused
from dflash_cache.kernels import check_layers
from dflash_cache.packed import MANY_DOCUMENTS, PackedRows
from dflash_cache.target import Target

# The largest error of a token's output in a mixer, relative to the usual size of one. Rounding
# stays well below; a document boundary that is not respected gives 0.5 and more.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# The largest error of what a layer adds to its tokens (see `apart` and `typical`). That is small
# beside the residual stream that it is added to, so it is rounded more coarsely than a mixer's
# output; another document's influence still changes it by its own size.
TOLERANCE_ALONE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
TOLERANCE_COMPILED = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# On CUDA the row is longer than a chunk of the delta rule, and has enough documents for attention
# with a mask; on the CPU it is short, so that it costs little.
LENGTHS_CPU = (19, 3, 24, 4)
LENGTHS_CUDA = (61, 3, 70, *(5,) * MANY_DOCUMENTS)
ALONE = slice(1, 4)  # these documents are run alone: what comes before and after them may leak
EDGE = 3  # tokens at a document's start: as far as a convolution of width 4 reaches


class Comparing(PackedRows):
    """Runs fused, and beside it the torch reference, document by document, on the same inputs.

    Layer by layer, so that rounding (or an expert that is chosen by a hair) does not grow through
    the model. `errors`: (layer, operation) -> relative error of the worst token.
    """

    def __init__(self, document: Tensor, device: torch.device, fused: Fused):
        super().__init__(document, device, fused)
        self.plain = PackedRows(document, device)
        self.errors: dict[tuple[int, str], float] = {}

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        have = super().conv(x, weight, bias, activation)
        want = self.plain.conv(x, weight, bias, activation)
        self.errors[self.layer, "convolution"] = worst_token(have.mT, want.mT)
        return have

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        have = super().delta(q, k, v, g, beta)
        want = self.plain.delta(q, k, v, g, beta)
        self.errors[self.layer, "delta rule"] = worst_token(have.flatten(2), want.flatten(2))
        return have


def worst_token(have: Tensor, want: Tensor) -> float:
    """[B, L, C] each: the largest error of a token over the root mean square size of a token."""
    error = (have.float() - want.float()).norm(dim=-1).max()
    return float(error / want.float().norm(dim=-1).square().mean().sqrt())


class Trace:
    """The hidden states [1, L, D] that enter and leave each decoder layer in one run.

    With `forced`, layer i gets `forced[i]` instead of what the layer before it gave.
    """

    def __init__(self, forced: list[Tensor] | None = None):
        self.forced = forced
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def before(self, _module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.inputs.append(hidden)
        if self.forced is not None:
            hidden = self.forced[len(self.inputs) - 1]
        if args:
            return (hidden, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden}

    def after(self, _module: Any, _inputs: Any, output: Any) -> None:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)

    @contextmanager
    def watching(self, target: Target) -> Iterator["Trace"]:
        layers = list(target.decoder.layers)
        handles = [x.register_forward_pre_hook(self.before, with_kwargs=True) for x in layers]
        handles += [x.register_forward_hook(self.after) for x in layers]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


def prove(target: Target) -> str:
    """Run a few short documents, packed and alone; returns one line for the log.

    Raises `UsageError` naming the layer if a fused operation differs from the torch reference by
    more than `TOLERANCE`, a document alone from the same one packed by more than
    `TOLERANCE_ALONE`, or if a layer did not run through our kernels.
    """
    lengths = LENGTHS_CUDA if target.device.type == "cuda" else LENGTHS_CPU
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (1, sum(lengths)), generator=generator)
    document = torch.repeat_interleave(torch.arange(len(lengths)) + 1, torch.tensor(lengths))[None]
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    runner = (
        PackedRows(document, target.device)
        if target.fused is None
        else Comparing(document, target.device, target.fused)
    )
    with Trace().watching(target) as packed:
        target.forward(runner, ids, position)
    check_layers(runner, target.kinds, target.fused)
    said = [target.describe_kernels()[0]]
    if isinstance(runner, Comparing):
        said.append(f"fused = reference {_check_fused(runner, TOLERANCE[target.dtype])}")
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)][ALONE]
    said.append(f"packed = alone {_check_alone(target, packed, ids, position, spans)}")
    return "; ".join(said)


def prove_compiled(target: Target, batch: tuple[Tensor, Tensor, Tensor]) -> str:
    """Compile the layers and compare one batch's states with the uncompiled ones; a log line.

    batch: input_ids, document, position [B, S]. Raises `UsageError` if the layers do not compile,
    or if the states of a typical token differ at a tap by more than `TOLERANCE_COMPILED`: fusing
    changes how sums are rounded, which in half precision grows through the layers.
    """
    document = batch[1]
    plain = target.run_rows(*batch)  # [B, S, T, D]
    target.compile()
    fast = target.run_rows(*batch)
    real = (document != 0).to(plain.device)
    error = (fast.float() - plain.float()).norm(dim=-1)[real]
    size = plain.float().norm(dim=-1)[real].clamp_min(torch.finfo(torch.float32).tiny)
    worst = float((error / size).nanmedian(dim=0).values.max())  # of the taps
    limit = TOLERANCE_COMPILED[target.dtype]
    if not worst <= limit and bool(plain[real].isfinite().all()):
        raise UsageError(
            f"the compiled layers give other states (relative error {worst:.1e}, allowed "
            f"{limit:.0e}); give --no-compile, or another version of torch"
        )
    return f"layers compiled; compiled = uncompiled {_within(worst, limit)}"


def _check_fused(runner: Comparing, limit: float) -> str:
    for (layer, operation), error in runner.errors.items():
        if not error <= limit:
            raise UsageError(
                f"layer {layer}: the fused {operation} differs from the torch reference on packed "
                f"documents (relative error {error:.1e}, allowed {limit:.0e}); try another version "
                "of flash-linear-attention, causal-conv1d or triton"
            )
    return _within(max(runner.errors.values()), limit)


def _check_alone(
    target: Target, packed: Trace, ids: Tensor, position: Tensor, spans: list[slice]
) -> str:
    """Each document alone, every layer fed with what it got in the packed row."""
    documents = [_alone(target, packed, ids, position, span) for span in spans]
    errors = [typical(list(tokens)) for tokens in zip(*documents, strict=True)]
    limit = TOLERANCE_ALONE[target.dtype]
    for layer, error in enumerate(errors, start=-1):
        if error > limit:
            where = f"layer {layer}" if layer >= 0 else "the embedding"
            raise UsageError(
                f"{where}: a document in a packed row has other states than alone (relative error "
                f"{error:.1e}, allowed {limit:.0e}), so this {target.config.model_type} lets "
                "documents see each other and cannot be run"
            )
    comparable = [error for error in errors if not math.isnan(error)]
    if not comparable:  # the job's guard judges such states, and stops
        return "(not checked: the target's states are not finite)"
    return _within(max(comparable), limit)


def _alone(
    target: Target, packed: Trace, ids: Tensor, position: Tensor, span: slice
) -> list[Tensor]:
    """`apart` [n] of the embedding and of every layer for the document at `span`."""
    forced = [x[:, span] for x in packed.inputs]
    runner = PackedRows(torch.ones_like(ids[:, span]), target.device, target.fused)
    with Trace(forced).watching(target) as alone:
        target.forward(runner, ids[:, span], position[:, span])
    errors = [apart(alone.inputs[0], forced[0], torch.zeros_like(forced[0]))]
    for before, have, want in zip(forced, alone.outputs, packed.outputs, strict=True):
        errors.append(apart(have, want[:, span], before))
    return errors


def _within(error: float, limit: float) -> str:
    return f"(checked, error {error:.1e} <= {limit:.0e})"


def apart(have: Tensor, want: Tensor, before: Tensor) -> Tensor:
    """How far two runs of a layer are apart in what they add to their common input `before`.

    [1, L, D] each -> [L], per token, relative to the addition. Layer by layer, since through a
    whole model in half precision rounding grows to the size of the states themselves. NaN where
    neither run is finite, which says nothing about packing; infinite where one is.
    """
    error = (have.float() - want.float()).norm(dim=-1)
    size = (want.float() - before.float()).norm(dim=-1)
    found = error / size.clamp_min(torch.finfo(torch.float32).tiny)
    finite = [x.isfinite().all(dim=-1) for x in (have, want)]
    found = found.masked_fill(finite[0] != finite[1], float("inf"))
    return found.masked_fill(~(finite[0] | finite[1]), float("nan"))[0]


def typical(documents: list[Tensor]) -> float:
    """One figure from the errors [n] of a layer's tokens, document by document.

    In half precision a token may choose another expert by a hair, or drown in the rounding of a
    massive activation. So medians count: over a document's tokens, and over the documents for
    each of their first tokens, which a leak from before hits in every document.
    """
    whole = [tokens.nanmedian() for tokens in documents]
    edges = torch.stack([tokens[:EDGE] for tokens in documents]).nanmedian(dim=0).values
    found = torch.stack([*whole, *edges])
    return float(found[~found.isnan()].max()) if not found.isnan().all() else float("nan")
