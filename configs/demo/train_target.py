"""Train the demo target: a small GatedDeltaNet hybrid (Qwen3_5ForCausalLM) on one GPU, in minutes.

Reads the folder of pretokenize.py; writes a Hugging Face model folder with its tokenizer and card.
`--smoke` proves the whole script on a CPU in under a minute with a tiny batch and three steps.
"""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # kernels and files come from this machine only

import delta_rule
import numpy as np
import torch
import torch.nn.functional as F
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from muon import Muon
from target_card import evaluate_and_describe, read_meta, samples
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig


def load_ids(folder: Path, name: str) -> np.ndarray:
    """The ids of one split as int64 [n]."""
    with np.load(folder / "tokens.npz") as file:
        return file[f"{name}_low"].astype(np.int64) | file[f"{name}_high"].astype(np.int64) << 8


def build_config(vocab: int) -> Qwen3_5TextConfig:
    """About 4.7M parameters: every fourth layer full attention, more value than key heads."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],  # sums to half of the 16 rotary dimensions
        "mrope_interleaved": True,
    }
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=288,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters=rope,
        eos_token_id=2,
        pad_token_id=0,
    )


def build_model(vocab: int) -> Qwen3_5ForCausalLM:
    """The model with fp32 weights; decays start slow (time steps 0.001 to 0.1), as in Mamba-2."""
    model = Qwen3_5ForCausalLM(build_config(vocab)).float()
    with torch.no_grad():
        model.model.embed_tokens.weight[0].normal_(std=0.02)  # the padding row is also a label
        for layer in model.model.layers:
            if layer.block_type == "linear_attention":
                step = torch.empty_like(layer.linear_attn.dt_bias).uniform_(-6.9, -2.3).exp()
                layer.linear_attn.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                layer.linear_attn.A_log.uniform_(1, 16).log_()
    model.model.embed_tokens.padding_idx = None  # padding_idx would block that row's gradient
    return model.train()


def run_layer(layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One decoder layer on [B, S, D]; no mask, so attention is plainly causal."""
    return layer(hidden, position_embeddings=(cos, sin), attention_mask=None)


def head_loss(norm: nn.Module, weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of [B, S, D] against [B, S]."""
    logits = F.linear(norm(hidden), weight)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Trainer:
    """The training step: forward in bf16 autocast layer by layer, Muon for matrices, AdamW else."""

    def __init__(self, model: Qwen3_5ForCausalLM, args: argparse.Namespace) -> None:
        """Compile one function a layer kind (two graphs in all), so that compiling stays short."""
        self.model, self.args = model, args
        device = model.device
        self.layer, self.head = run_layer, head_loss
        if args.compile == "on" or (args.compile == "auto" and device.type == "cuda"):
            self.layer = torch.compile(run_layer, dynamic=False, fullgraph=True)
            self.head = torch.compile(head_loss, dynamic=False, fullgraph=True)
        positions = torch.arange(args.seq, device=device).expand(3, 1, -1)
        with torch.no_grad():
            dummy = torch.zeros(1, 1, 1, device=device)
            self.cos, self.sin = model.model.rotary_emb(dummy, positions)  # [1, S, 16]
        self.parameters = list(model.parameters())
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            hidden = parameter.ndim == 2 and min(parameter.shape) > 8 and "embed" not in name
            (matrices if hidden else others).append(parameter)
        self.muon = Muon(matrices, momentum=0.95, decay=0.01)
        self.adam = torch.optim.AdamW(
            others, lr=args.lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )

    def loss(self, ids: Tensor) -> Tensor:
        """Next-token loss of ids [B, S + 1]; fp32 on a CPU, where bf16 is slow."""
        body = self.model.model
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            hidden = body.embed_tokens(ids[:, :-1])
            for layer in body.layers:
                hidden = self.layer(layer, hidden, self.cos, self.sin)
            return self.head(body.norm, self.model.lm_head.weight, hidden, ids[:, 1:])

    def step(self, ids: Tensor, rate: float) -> Tensor:
        """One update at `rate` (0..1) of the peak learning rates; the detached loss."""
        loss = self.loss(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(rate * self.args.muon_lr)
        self.adam.param_groups[0]["lr"] = rate * self.args.lr
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    def snapshot(self) -> list[Tensor]:
        """Copies of all weights."""
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def restore(self, weights: list[Tensor]) -> None:
        """Back to a snapshot, with fresh optimizer state."""
        torch._foreach_copy_(self.parameters, weights)
        self.muon.reset()
        self.adam.state.clear()


def batches(ids: Tensor, batch: int, seq: int):
    """Endless [B, S + 1] windows: every epoch a new order and a new offset of the cuts."""
    span = torch.arange(seq + 1, device=ids.device)
    while True:
        shift = int(torch.randint(seq, ()))
        count = (len(ids) - 1 - shift) // seq
        order = torch.randperm(count, device=ids.device) * seq + shift
        for first in range(0, count - batch + 1, batch):
            yield ids[order[first : first + batch, None] + span]


def schedule(step: int, progress: float) -> float:
    """Linear warm-up over 100 steps, flat until 40 % of the time, then linear to zero."""
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.0, 1 - progress) / 0.6)


def train(trainer: Trainer, ids: Tensor, args: argparse.Namespace, start: float) -> dict:
    """Train until the time is up (or for args.steps steps); returns counts for the card."""
    limit, factor, losses, good = args.minutes * 60, 1.0, [], trainer.snapshot()
    step, mark, marked = 0, time.time(), 0
    first, loss = mark, float("nan")
    for window in batches(ids, args.batch, args.seq):
        now = time.time()
        progress = step / args.steps if args.steps else (now - first) / (limit - (first - start))
        if progress >= 1:
            break
        losses.append(trainer.step(window, factor * schedule(step, progress)))
        step += 1
        if step <= 3 or step % args.log_every == 0:
            loss = float(torch.stack(losses).mean())  # waits for the GPU
            now, rate = time.time(), factor * schedule(step, progress)
            speed = (step - marked) * args.batch * args.seq / (now - mark)
            print(
                f"step {step} | loss {loss:.4f} | lr {rate * args.muon_lr:.5f} | "
                f"{speed:,.0f} tok/s | {now - start:.0f} s",
                flush=True,
            )
            mark, marked, losses = now, step, []
            if np.isfinite(loss):
                good = trainer.snapshot()
            else:
                factor /= 2
                trainer.restore(good)
                print(f"loss is not finite: back to the last good weights, rate x {factor}")
    weights_finite = all(bool(p.isfinite().all()) for p in trainer.parameters)
    if not weights_finite:
        trainer.restore(good)
    return {"steps": step, "tokens": step * args.batch * args.seq, "train_loss": loss}


def save(model: Qwen3_5ForCausalLM, args: argparse.Namespace) -> None:
    """Weights in bf16, configs and tokenizer files."""
    model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[2, 0], pad_token_id=0, max_new_tokens=256
    )
    model.save_pretrained(args.out)
    for file in (args.data / "tokenizer").iterdir():
        (args.out / file.name).write_bytes(file.read_bytes())


def parse_args() -> argparse.Namespace:
    """The command line; --smoke shrinks everything."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=kind
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of pretokenize.py")
    add("--out", type=Path, required=True, help="model folder to write")
    add("--minutes", type=float, default=6.5, help="time for start, compiling and training")
    add("--steps", type=int, default=0, help="train this many steps instead of a time")
    add("--batch", type=int, default=128, help="windows in a step")
    add("--seq", type=int, default=1024, help="tokens in a window")
    add("--lr", type=float, default=4e-3, help="AdamW's peak rate: embedding, norms, gates")
    add("--muon-lr", type=float, default=0.02, help="Muon's peak rate: the matrices")
    add("--log-every", type=int, default=50, help="steps between log lines")
    add("--seed", type=int, default=0, help="initialisation and order of the data")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="auto: on a GPU")
    add("--smoke", action="store_true", help="three tiny steps, on a CPU too")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.batch, args.seq = args.steps or 3, 1, 64
    return args


def main() -> None:
    """Train, save, then reload what was saved and measure it."""
    start = time.time()
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.smoke:
        raise SystemExit("train_target: no GPU here; --smoke proves the script on a CPU")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    delta_rule.bind(modeling)
    meta = read_meta(args.data)
    vocab = (meta["tokenizer_size"] + 1 + 63) // 64 * 64  # one spare row at least: the mask token
    model = build_model(vocab).to(device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, vocabulary {vocab}, {device}", flush=True)
    ids = torch.from_numpy(load_ids(args.data, "train")).to(device)
    result = train(Trainer(model, args), ids, args, start) | {"parameters": count, "seq": args.seq}
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, args)
    print(f"saved {args.out} after {time.time() - start:.0f} s", flush=True)
    result["seconds"] = round(time.time() - start)
    result["command"] = "python3 " + shlex.join(sys.argv)
    held = torch.from_numpy(load_ids(args.data, "heldout")).to(device)
    evaluate_and_describe(args.out, held[:500] if args.smoke else held, meta, result)
    samples(args.out, device, 4 if args.smoke else 160)
    print(f"done after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
