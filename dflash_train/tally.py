"""What a step counts on the device, and what a log step reads of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.anchors import DraftInputs
from dflash_train.ranks import Ranks

MAX_SKIPPED = 10  # non-finite steps in a row that stop a run


@dataclass(frozen=True)
class Tally:
    """What a forward counts, all float64 and summed over its blocks; P = K-1 positions.

    loss: sum of weight * nll; weight: what divides it, the sum of weights or the number of valid
    anchors; blocks: blocks with all P labels supervised; accepted: their leading correct slots;
    context: sum of the context lengths of valid anchors; anchors: valid anchors; right, labels [P]:
    correct and supervised slots by position.
    """

    loss: Tensor
    weight: Tensor
    blocks: Tensor
    accepted: Tensor
    context: Tensor
    anchors: Tensor
    right: Tensor
    labels: Tensor

    def flat(self) -> Tensor:
        """[6 + 2P]"""
        scalars = (self.loss, self.weight, self.blocks, self.accepted, self.context, self.anchors)
        return torch.cat([torch.stack(scalars), self.right, self.labels])


@dataclass(frozen=True)
class StepReport:
    """Averages over the steps since the last report, on the host; since the start of the session
    the steps skipped, at most in a row, and the rows of the last MAX_SKIPPED of them."""

    loss: float
    tau: float
    accuracy: list[float]
    grad_norm: float
    context: float
    skipped: int
    longest_skip: int
    bad_rows: list[int]


def accepted_length(correct: Tensor, valid: Tensor) -> Tensor:
    """Leading slots that are supervised and correct: [..., K-1] twice -> [...], float32."""
    return (correct.float() * valid).cumprod(-1).sum(-1)


def tally_of(loss: Tensor, weight: Tensor, correct: Tensor, blocks: DraftInputs) -> Tally:
    """Count blocks: correct [B, N, K-1]; `loss` is to be divided by the sum of `weight`."""
    valid = blocks.weights_valid
    full = valid[..., -1]  # cumulative, so the last one tells whether all are supervised
    right = correct.float() * valid
    length = (blocks.anchors - blocks.lo) * blocks.valid_anchor
    double = torch.float64
    return Tally(
        loss=loss.detach().to(double),
        weight=weight.sum(dtype=double),
        blocks=full.sum(dtype=double),
        accepted=(accepted_length(correct, valid) * full).sum(dtype=double),
        context=length.sum(dtype=double),
        anchors=blocks.valid_anchor.sum(dtype=double),
        right=right.sum((0, 1), dtype=double),
        labels=valid.sum((0, 1), dtype=double),
    )


class Counters:
    """Sums of Tally on the device, and what is known of skipped steps; read at log steps only.

    `rows` int64 [turns, G] is memory for the ids of a step's rows, on the device.
    """

    def __init__(self, positions: int, rows: Tensor):
        self.positions, device = positions, rows.device
        width = 6 + 2 * positions
        self.sums = torch.zeros(width, dtype=torch.float64, device=device)
        self.this_step = torch.zeros_like(self.sums)
        # sum of gradient norms, steps that counted, skipped, skipped in a row now, at most
        self.steps = torch.zeros(5, dtype=torch.float64, device=device)
        self.rows = rows
        self.bad_rows = rows.new_zeros(MAX_SKIPPED, *rows.shape)  # a ring of skipped steps
        self.place = torch.arange(MAX_SKIPPED, device=device)

    def begin(self) -> None:
        self.this_step.zero_()

    def add(self, turn: int, tally: Tensor, row_ids: Tensor) -> None:
        self.this_step += tally
        self.rows[turn].copy_(row_ids)

    def step_weight(self) -> Tensor:
        return self.this_step[1]

    def finish(self, norm: Tensor) -> Tensor:
        """End the step; returns whether it must be skipped, as a 0-d float."""
        finite = torch.isfinite(norm) & torch.isfinite(self.this_step[0])
        bad = (~finite).double()
        self.sums += torch.where(finite, self.this_step, 0.0)
        here = ~finite & (self.place == self.steps[2] % MAX_SKIPPED)
        self.bad_rows.copy_(torch.where(here[:, None, None], self.rows, self.bad_rows))
        streak = (self.steps[3] + bad) * bad
        longest = torch.maximum(self.steps[4], streak)
        self.steps[0] += torch.where(finite, norm.double(), 0.0)
        self.steps[1] += 1 - bad
        self.steps[2] += bad
        self.steps[3] = streak
        self.steps[4] = longest
        return bad

    def read(self, ranks: Ranks) -> StepReport:
        loss, weight, blocks, accepted, context, anchors, *by_position = self.sums.tolist()
        norms, counted, skipped, _, longest = self.steps.tolist()
        right, labels = by_position[: self.positions], by_position[self.positions :]
        bad = self.bad_rows[: min(int(skipped), MAX_SKIPPED)]
        self.sums.zero_()
        self.steps[:2].zero_()
        return StepReport(
            loss=_ratio(loss, weight),
            tau=_ratio(accepted, blocks) + 1,
            accuracy=[_ratio(r, n) for r, n in zip(right, labels, strict=True)],
            grad_norm=_ratio(norms, counted),
            context=_ratio(context, anchors),
            skipped=int(skipped),
            longest_skip=int(longest),
            bad_rows=sorted(set(ranks.all_of(bad))) if skipped else [],
        )


def _ratio(total: float, count: float) -> float:
    """nan where nothing was counted: no supervised block, say."""
    return total / count if count else math.nan
