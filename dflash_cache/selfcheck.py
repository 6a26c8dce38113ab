"""Prove, on the machine at hand, that the fused kernels give every document its own states."""

import torch
from torch import Tensor

from dflash_cache.errors import UsageError
from dflash_cache.kernels import Fused, check_layers
from dflash_cache.packed import PackedRows
from dflash_cache.target import Target

# The largest error of a token's output in a mixer, relative to the usual size of one. Rounding
# stays well below; a document boundary that is not respected gives 0.5 and more.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
LENGTHS = (61, 3, 70)


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


def prove(target: Target) -> str:
    """Run three packed documents through the fused kernels, compared with the torch reference.

    Returns one line for the log. Raises `UsageError` naming the layer if a layer's outputs differ
    by more than `TOLERANCE`, are not finite, or did not come from a fused kernel. Without fused
    kernels (on the CPU) the reference is what runs anyway.
    """
    if target.fused is None:
        return target.describe_kernels()[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (1, sum(LENGTHS)), generator=generator)
    document = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
    position = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    runner = Comparing(document, target.device, target.fused)
    target.forward(runner, ids, position)
    check_layers(runner, target.kinds, target.fused)
    limit = TOLERANCE[target.dtype]
    for (layer, operation), error in runner.errors.items():
        if not error <= limit:
            raise UsageError(
                f"layer {layer}: the fused {operation} differs from the torch reference on packed "
                f"documents (relative error {error:.1e}, allowed {limit:.0e}); try another version "
                "of flash-linear-attention, causal-conv1d or triton"
            )
    worst = max(runner.errors.values())
    return f"{target.describe_kernels()[0]}; checked, error {worst:.1e} <= {limit:.0e}"
