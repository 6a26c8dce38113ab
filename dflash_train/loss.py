"""Cross-entropy through the target's frozen head, without ever holding all logits at once."""

import math

import torch
from torch import Tensor

_TINY = 1e-6
DPACE_FLOOR = 0.5  # the share of each probability that the product takes as given


def default_gamma(block_size: int) -> float:
    """The paper's decay for K = 8, 10, 16 is 4, 5, 7; straight lines between and beyond them."""
    if block_size <= 10:
        return block_size / 2
    return 5 + (block_size - 10) / 3


def decay_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k-1)/gamma) for k = 1..K-1, float32 `[K-1]` (arXiv 2602.06036)."""
    step = torch.arange(block_size - 1, dtype=torch.float32, device=device)
    return torch.exp(-step / gamma)


def dpace_weights(nll: Tensor, valid: Tensor, floor: float = DPACE_FLOOR) -> Tensor:
    """Weight of each slot: how much of the expected accepted length hangs on it (arXiv 2605.18810).

    With q = (1 - floor) * exp(-nll) + floor, the expected length is the sum over m of the product
    of q_1..q_m; its derivative by log q_j, the sum over m >= j, is the weight of slot j. Slots that
    are not valid count 1 in the products and 0 in the sums. `nll`, `valid` (0 or 1) and the result
    are float `[..., K-1]`; none carries a gradient.
    """
    sure = (1 - floor) * torch.exp(-nll) + floor
    reach = torch.where(valid > 0, sure, 1.0).cumprod(-1) * valid
    return reach.flip(-1).cumsum(-1).flip(-1) * valid


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    denominator: Tensor,
    chunk: int | None = None,
    *,
    dpace_slots: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """sum(weights * nll) / denominator, with nll the cross-entropy of softmax(hidden @ head.T).

    The gradient of `hidden` is made in the forward, chunk by chunk: two matrix products a chunk and
    nothing of size M*V kept. Products run in the dtype of `hidden`, everything else in fp32 (fp64
    if `hidden` is). The head gets no gradient.

    Args:
        hidden: `[M, D]`.
        head: `[V, D]`, the target's output matrix, in the dtype of `hidden`.
        labels: int64 `[M]`.
        weights: float `[M]`, 0 for tokens that do not count.
        denominator: 0-d tensor, the sum of weights over the global batch; kept away from 0.
        chunk: tokens whose logits exist at once; by default about an eighth of M, 1024 to 4096.
        dpace_slots: if given, `weights` only say which tokens count (0 or 1), each run of so many
            tokens is a block, and `dpace_weights` weigh it. Chunks are then cut between blocks, so
            that a chunk's own nll gives its weights before its gradient: no second pass.

    Returns:
        loss 0-d; nll `[M]`; correct bool `[M]`, whether the label has the largest logit. The last
        two carry no gradient.
    """
    return _LinearCrossEntropy.apply(
        hidden,
        head,
        labels,
        weights,
        denominator,
        chunk or chunk_size(hidden.shape[0]),
        dpace_slots,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, weights, denominator, chunk, slots):
        scale = weights / denominator.clamp(min=_TINY)  # [M]
        if slots is not None:
            chunk = max(1, chunk // slots) * slots
        pieces = []
        for i in range(0, hidden.shape[0], chunk):
            part = slice(i, i + chunk)
            pieces.append(_piece(hidden[part], head, labels[part], scale[part], slots))
        nll, correct, grad, scale = (torch.cat(part) for part in zip(*pieces, strict=True))
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(nll, correct)
        return (nll * scale).sum(), nll, correct

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = ctx.saved_tensors
        return (grad * grads[0]).to(grad.dtype), *[None] * 6


def _piece(
    hidden: Tensor, head: Tensor, labels: Tensor, scale: Tensor, slots: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """nll, correct, the gradient of sum(scale * nll) of `[m, D]` tokens, and that scale `[m]`."""
    logits = hidden @ head.T  # [m, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = torch.logsumexp(logits, dim=1, keepdim=True)  # [m, 1]
    nll = (total - logits.gather(1, labels[:, None])).squeeze(1)
    if slots is not None:
        valid = (scale > 0).to(nll.dtype).view(-1, slots)
        scale = scale * dpace_weights(nll.view(-1, slots), valid).view(-1)
    place = torch.arange(head.shape[0], device=head.device)
    wrong = torch.exp(logits - total) - (place == labels[:, None]).to(logits.dtype)
    grad = (wrong * scale[:, None]).to(hidden.dtype) @ head
    return nll, logits.argmax(dim=1) == labels, grad, scale


def chunk_size(tokens: int) -> int:
    """Tokens whose logits exist at once, for `tokens` in all."""
    eighth = math.ceil(tokens / 8 / 128) * 128
    return min(4096, max(1024, eighth))
