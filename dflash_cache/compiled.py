"""Compile a target's decoder layers, with our own token mixers kept whole inside the graph.

Half of a fused hybrid's forward is elementwise work (norms, gates, casts, residuals) that the
compiler fuses. The mixers enter the graph as opaque operators, which ask the active runner when
they run, as the functions of `kernels` do in eager mode: so the same kernels run in every layer,
counted all the same, and one graph serves all layers of a kind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from dflash_cache.errors import UsageError, first_line

LIMIT = 64  # graphs of one layer class: one per kind of layer and shape of batch
_runner: list[Callable[[], Any]] = []


def connect(active: Callable[[], Any]) -> None:
    """Tell the operators how to find the active `kernels.Runner`."""
    _runner[:] = [active]


@torch.library.custom_op("dflash::conv", mutates_args=())
def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """`Runner.conv`: x [B, C, L] -> [B, C, L], its channels innermost in memory."""
    out = _runner[0]().conv(x, weight, bias, activation)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    rows, channels, length = x.shape
    return x.new_empty(rows, length, channels).transpose(1, 2)


@torch.library.custom_op("dflash::delta", mutates_args=())
def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`Runner.delta` -> [B, L, Hv, dv]."""
    return _runner[0]().delta(q, k, v, g, beta).contiguous()


@delta.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("dflash::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """`Runner.attend`, its output as [B, L, H, h]."""
    runner = _runner[0]()
    runner.windows[runner.layer] = window
    return runner.attend(q, k, v, scale, window).transpose(1, 2).contiguous()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Replace each layer's forward by a compiled one; hooks of the layer stay outside of it.

    The first batch of a shape compiles: about a minute. A layer that cannot be one graph is an
    error then (see `explaining`); none runs uncompiled in silence.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)


@contextmanager
def explaining() -> Iterator[None]:
    """Turns the compiler's errors into one sentence."""
    try:
        yield
    except TorchDynamoException as error:
        raise UsageError(
            f"the target's layers do not compile ({first_line(error)}); give --no-compile, which "
            "is slower"
        ) from error
