"""One optimizer step: rows of the cache in, loss and counters on the device; no host sync.

On CUDA drafter and loss are one compiled graph of fixed shapes, and the update is one fused kernel;
anchors and masks are drawn before it by small kernels, so that what the attention kernel reads of
them lies in memory. On the CPU the same functions run eagerly.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_cache.cache import FrozenTarget
from dflash_cache.encoding import Codec
from dflash_train.anchors import DraftInputs, candidates, draft_inputs, sample_anchors
from dflash_train.attention import Masks, build_masks
from dflash_train.config import TrainConfig
from dflash_train.drafter import Drafter, DrafterConfig
from dflash_train.loss import decay_weights, default_gamma, linear_cross_entropy
from dflash_train.ranks import Ranks
from dflash_train.rows import Batch
from dflash_train.tally import Counters, StepReport, tally_of


def hidden_of_slots(
    drafter: Drafter,
    embed: Tensor,
    states: Tensor,
    position: Tensor,
    blocks: DraftInputs,
    masks: Masks,
) -> Tensor:
    """The drafter's output at the K-1 slots of each block that predict: [B, N, K-1, D].

    `states` [B, S, T, D] decoded; `embed` [V, D], whose dtype is the computation's: the drafter
    casts its fp32 masters to it within the graph.
    """
    rows, n = blocks.anchors.shape
    noise = F.embedding(blocks.tokens, embed)  # [B, Q, D]
    hidden = drafter(states, noise, position.long(), blocks.q_positions, masks)
    return hidden.view(rows, n, drafter.config.block_size, -1)[:, :, 1:]


@torch.no_grad()
def blocks_at(
    batch: Batch, anchors: Tensor, valid: Tensor, shape: DrafterConfig
) -> tuple[DraftInputs, Masks]:
    """What the compiled part is given of a batch besides its states, for `anchors` [B, N]."""
    blocks = draft_inputs(
        batch.input_ids,
        batch.loss_mask,
        batch.document,
        batch.position,
        anchors,
        valid,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    masks = build_masks(blocks.anchors, blocks.lo, shape, seq_len=batch.position.shape[1])
    return blocks, masks


class TrainStep:
    """Owns optimizer, frozen matrices and device counters; `run(stream, lr)` is one step.

    `codec` decodes the cache's states (default: bf16's). Gradients of
    `accumulation` batches are summed unscaled; the fused update divides by the sum of
    the weights of all of them and by the clip factor (its `grad_scale`), and leaves everything as
    it was when loss or norm are not finite (its `found_inf`). Of `ranks` each does its share of
    the batches; sums, norm and so the update are the same on all.
    """

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenTarget,
        config: TrainConfig,
        *,
        anchors: int,
        codec: Codec | None = None,
        ranks: Ranks | None = None,
    ):
        self.ranks = ranks or Ranks()
        self.turns = self.ranks.share(config.accumulation)
        self.codec = codec or Codec()
        self.drafter, self.frozen, self.config, self.anchors = drafter, frozen, config, anchors
        parameter = next(drafter.parameters())
        device = self.device = parameter.device
        slots = drafter.config.block_size
        gamma = config.gamma or default_gamma(slots)
        self.decay = decay_weights(slots, gamma).to(device, torch.float32)  # [K-1]
        self.dpace = config.loss == "dpace"
        self.seed = torch.tensor(config.seed, device=device)
        self.one = torch.ones((), device=device)
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=self.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.optimizer.grad_scale = torch.ones((), device=device)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        rows = torch.zeros(self.turns, config.batch_rows, dtype=torch.int64, device=device)
        self._counters = Counters(slots - 1, rows)
        self.forward = self._forward
        if device.type == "cuda":
            self.forward = torch.compile(self._forward, dynamic=False, fullgraph=True)

    def run(self, stream: Iterator[Batch], lr: float) -> None:
        """One optimizer step over this rank's next `turns` batches; queues work, waits for none."""
        self._counters.begin()
        for turn in range(self.turns):
            batch = next(stream)
            blocks, masks = self.prepare(batch)
            states = self.codec.decode(batch.states, batch.scales)
            loss, tally = self.forward(states, batch.position, blocks, masks)
            loss.backward()
            self._counters.add(turn, tally, batch.row_ids)
        self.lr.fill_(lr)
        self._update()

    def report(self) -> StepReport:
        """Read and reset the counters; waits for the device. All ranks must come here together."""
        return self._counters.read(self.ranks)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[DraftInputs, Masks]:
        """Draw the anchors of a batch, and what follows from them; small kernels, no sync."""
        allowed = candidates(batch.loss_mask, batch.document, batch.position)
        anchors, valid = sample_anchors(
            allowed, batch.row_ids, seed=self.seed, epoch=batch.epochs, n=self.anchors
        )
        return blocks_at(batch, anchors, valid, self.drafter.config)

    def _forward(
        self, states: Tensor, position: Tensor, blocks: DraftInputs, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Sum of weight * nll (not yet averaged), and the flat Tally; states [B, S, T, D].

        What it is divided by later: the sum of the weights, but with D-PACE the number of valid
        anchors, since its weights are what a slot is worth.
        """
        hidden = hidden_of_slots(self.drafter, self.frozen.embed, states, position, blocks, masks)
        weights = blocks.weights_valid  # [B, N, K-1]
        if not self.dpace:
            weights = weights * self.decay
        loss, _, correct = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.frozen.head,
            blocks.labels.reshape(-1),
            weights.reshape(-1),
            self.one,
            dpace_slots=weights.shape[-1] if self.dpace else None,
        )
        weight = blocks.valid_anchor if self.dpace else weights
        tally = tally_of(loss, weight, correct.view_as(weights), blocks)
        return loss, tally.flat()

    def _update(self) -> None:
        counters, optimizer = self._counters, self.optimizer
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        self.ranks.sum_(gradients)
        self.ranks.sum_([counters.this_step])
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self.ranks.from_first_([norm])  # one verdict and one clip factor, to the bit
        weight = counters.step_weight().float().clamp(min=1e-6)
        norm = norm / weight
        clip = (norm / self.config.clip).clamp(min=1.0)
        bad = counters.finish(norm)
        optimizer.grad_scale.copy_(weight * clip)  # type: ignore[attr-defined]
        optimizer.found_inf.copy_(bad)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """Linear over the first `warmup * steps` steps, then a cosine to 0 at `steps`; step from 0."""
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
