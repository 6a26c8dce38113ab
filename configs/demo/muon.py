"""Muon for the matrices of a small model, all matrices of one shape in one batched update.

Momentum orthogonalised by five Newton-Schulz steps (Keller Jordan's Muon, 2024); everything that
is no hidden matrix belongs to AdamW.
"""

import torch
from torch import Tensor, nn


def orthogonalise(grads: Tensor) -> Tensor:
    """Push the singular values of [N, R, C] towards 1 with the quintic Newton-Schulz iteration."""
    x = grads.bfloat16() if grads.is_cuda else grads
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.transpose(1, 2) if tall else x).to(grads.dtype)


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, decay: float) -> None:
        """Groups 2-D parameters by shape."""
        self.momentum, self.decay = momentum, decay
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(parameter.shape, []).append(parameter)
        self.reset()

    def reset(self) -> None:
        """Forget the momentum."""
        self.buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; gradients must be present."""
        for shape, group in self.groups.items():
            grads = torch.stack([p.grad for p in group if p.grad is not None])
            buffer = self.buffers[shape].lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-rate * scale)
