"""Run packed rows: delta rule, convolution and attention restart at every document."""

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dflash_cache import reference
from dflash_cache.fused import Fused
from dflash_cache.kernels import REFERENCE, Runner

# With more documents than this in a row, one attention with a mask is cheaper than a launch each.
MANY_DOCUMENTS = 24


class PackedRows(Runner):
    """The mixers of one batch of rows.

    document: int [B, S], 0 = padding, equal numbers = one document, contiguous within a row.
    With `fused` None everything is plain torch, document by document, and padding gives zeros.
    """

    def __init__(self, document: Tensor, device: torch.device, fused: Fused | None = None):
        super().__init__()
        self.host = document.to("cpu", torch.int32).contiguous()
        self.device, self.fused = device, fused
        self.segments = _segments(self.host.numpy())
        self.documents = [s for s in self.segments if int(self.host[s[0], s[1]]) != 0]

    @cached_property
    def document(self) -> Tensor:
        """int32 [B, S] on the device."""
        return self.host.to(self.device)

    @cached_property
    def cu_seqlens_host(self) -> Tensor:
        """int64 [number of segments + 1] over the flattened batch; padding is a segment too."""
        row_length = self.host.shape[1]
        starts = [row * row_length + start for row, start, _ in self.segments]
        return torch.tensor([*starts, self.host.numel()], dtype=torch.int64)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return self.cu_seqlens_host.to(self.device)

    @cached_property
    def mask(self) -> Tensor:
        """bool [B, 1, S, S]: same document and not later."""
        same = self.document[:, None, :, None] == self.document[:, None, None, :]
        return same.tril()

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        if self.fused is not None:
            self.count("conv", self.fused.conv_name)
            return self.fused.conv(x, weight, bias, activation, self.document, self.cu_seqlens)
        self.count("conv", REFERENCE)
        out = torch.zeros_like(x)  # [B, C, L]
        for row, start, stop in self.documents:
            part = x[row : row + 1, :, start:stop]
            out[row, :, start:stop] = reference.causal_conv(part, weight, bias, activation)[0]
        return out

    def delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        if self.fused is not None:
            return self._fused_delta(self.fused, q, k, v, g, beta)
        self.count("delta", REFERENCE)
        out = torch.zeros_like(v)  # [B, L, Hv, dv]
        for row, start, stop in self.documents:
            part = (x[row : row + 1, start:stop] for x in (q, k, v, g, beta))
            out[row, start:stop] = reference.delta_rule(*part)[0][0]
        return out

    def _fused_delta(
        self, fused: Fused, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        self.count("delta", f"fla.chunk_{fused.rule}")
        flat = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v, g, beta)]  # [1, B*L, ..]
        # The host copy spares a synchronisation per layer.
        out, _ = fused.chunk(
            *flat,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.cu_seqlens,
            cu_seqlens_cpu=self.cu_seqlens_host,
        )
        return out.reshape(v.shape)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        if q.is_cuda and len(self.documents) > MANY_DOCUMENTS * len(self.host):
            return self.attend_masked(q, k, v, scale, window)
        self.count("attention", "sdpa per document")
        out = q.new_zeros(*q.shape[:3], v.shape[-1])  # [B, H, L, h]
        for row, start, stop in self.documents:
            query, key, value = (x[row : row + 1, :, start:stop] for x in (q, k, v))
            part = reference.causal_attention(query, key, value, scale, window)
            out[row, :, start:stop] = part[0]
        return out

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """The same in one call with the mask of the whole batch."""
        self.count("attention", "sdpa with a document mask")
        mask, length = self.mask, q.shape[2]
        if window is not None and window < length:
            rows = torch.arange(length, device=q.device)[:, None]
            mask = mask & reference.window_mask(rows, length, window)
        return reference.attend(q, k, v, scale, mask=mask)


def _segments(document: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every run of equal numbers in int [B, S], padding included."""
    segments = []
    for row, numbers in enumerate(document):
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        bounds = [0, *cuts.tolist(), len(numbers)]
        segments += [(row, a, b) for a, b in pairwise(bounds)]
    return segments
