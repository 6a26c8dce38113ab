"""Measure the trained demo target from its saved files, write its card, print samples."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

PREFIXES = [
    'def read_json(path):\n    """Read a JSON file and return its content."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
REQUEST = "Write `clamp(value, low, high)`: Return value limited to the range from low to high."

CARD = """\
# Demo target: a small GatedDeltaNet hybrid that writes Python

`Qwen3_5ForCausalLM` with {parameters:,} parameters (bf16): 8 layers, three GatedDeltaNet to one
full attention, hidden size 256, tied embeddings, a byte-level BPE of {tokenizer_size:,} tokens and
a ChatML-like template. It exists to demonstrate and test training of a DFlash drafter; it is no
useful assistant. Embedding rows from {tokenizer_size} on are never produced by the tokenizer; the
drafter's mask token is one of them.

## Training
From scratch on {train_tokens:,} tokens ({steps:,} steps, {tokens:,} tokens seen, windows of {seq}
tokens) in {seconds} seconds on {device}, loading and compiling included:

    {command}

Data: Python source and documentation, by `configs/demo/build_corpus.py`. Licences as the packages'
metadata states them:

{licences}

## Measured
On {heldout_documents:,} held-out documents ({heldout_tokens:,} tokens, {heldout_bytes:,} bytes;
whole files held out, and pieces that share over half of their lines with the training set dropped),
with the saved bf16 weights in windows of 1,024 tokens: loss {loss:.4f} nats a token,
**{bits:.4f} bits per byte**. Last training loss {train_loss:.4f}.
"""


def read_meta(folder: Path) -> dict:
    """The counts that pretokenize.py wrote."""
    return json.loads((folder / "meta.json").read_text())


@torch.no_grad()
def heldout_loss(model: Qwen3_5ForCausalLM, ids: Tensor, window: int = 1024) -> tuple[float, int]:
    """(summed nats, predicted tokens) over ids [n] in consecutive windows of one context each."""
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    starts = list(range(0, len(ids) - 1, window))
    full = [s for s in starts if s + window < len(ids)]
    groups = [full[i : i + 16] for i in range(0, len(full), 16)] + [
        [s] for s in starts[len(full) :]
    ]
    for group in groups:
        rows = torch.stack([ids[s : s + window + 1] for s in group])  # [B, W + 1]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        total += losses.double().sum()
    return float(total), len(ids) - 1


def load(folder: Path, device: str | torch.device, dtype=torch.bfloat16) -> Qwen3_5ForCausalLM:
    """The saved model in the given precision, for inference."""
    return Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def evaluate_and_describe(folder: Path, ids: Tensor, meta: dict, result: dict) -> None:
    """Held-out loss of the saved weights, printed and written into README.md."""
    nats, count = heldout_loss(load(folder, ids.device), ids)
    share = len(ids) / meta["heldout_tokens"]  # below 1 only in a smoke run
    bits = nats / math.log(2) / (meta["heldout_bytes"] * share)
    print(
        f"held-out: loss {nats / count:.4f} | {bits:.4f} bits per byte | {count:,} tokens",
        flush=True,
    )
    name = torch.cuda.get_device_name() if ids.is_cuda else "a CPU (smoke run)"
    licences = "\n".join(f"- {k}: {v}" for k, v in meta["corpus"]["licences"].items())
    facts = meta | result | {"licences": licences, "device": name}
    (folder / "README.md").write_text(CARD.format(**facts, loss=nats / count, bits=bits))


def samples(folder: Path, device: str, tokens: int) -> None:
    """Print greedy continuations of two code prefixes and of one chat request."""
    model, tokenizer = load(folder, device), AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": REQUEST}], tokenize=False, add_generation_prompt=True
    )
    for prompt in [*PREFIXES, chat]:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(
            device
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
        )
        print("-" * 60 + "\n" + tokenizer.decode(out[0]), flush=True)
