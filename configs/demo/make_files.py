"""Write the demo's corpus.jsonl and prompts.jsonl from what regenerate.py made.

The corpus is a sample of the regenerated training documents, as token ids; the prompts are
held-out ones as text and chats, which a person can read.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer


def sample_lines(source: Path, count: int, seed: int) -> list[str]:
    """`count` lines of a .jsonl.gz file, drawn at random, without what training does not read."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    chosen = random.Random(seed).sample(lines, count)
    records = (json.loads(line) for line in chosen)
    kept = ({key: r[key] for key in ("input_ids", "loss_mask")} for r in records)
    return [json.dumps(record, separators=(",", ":")) for record in kept]


def prompt_record(name: str, ids: list[int], tokenizer) -> dict:
    """A text prompt, or the user's turn of a chat prompt."""
    if name.startswith("text"):
        return {"text": tokenizer.decode(ids)}
    user = tokenizer.decode(ids).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    return {"messages": [{"role": "user", "content": user}]}


def main() -> None:
    """The command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=kind)
    parser.add_argument("--model", type=Path, required=True, help="target folder")
    parser.add_argument("--regenerated", type=Path, required=True, help=".jsonl.gz of training")
    parser.add_argument("--prompts", type=Path, required=True, help=".npz of held-out prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--documents", type=int, default=800, help="documents in the corpus")
    parser.add_argument("--count", type=int, default=40, help="prompts, half of them chats")
    parser.add_argument("--seed", type=int, default=0, help="seed of both draws")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = sample_lines(args.regenerated, args.documents, args.seed)
    (args.out / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with np.load(args.prompts) as file:
        pairs = [(name, ids.tolist()) for name in file.files for ids in file[name]]
    random.Random(args.seed).shuffle(pairs)
    chats, texts = ([p for p in pairs if p[0].startswith(k)] for k in ("chat", "text"))
    mixed = [p for both in zip(chats, texts, strict=False) for p in both][: args.count]
    records = [prompt_record(name, ids, tokenizer) for name, ids in mixed]
    text = "\n".join(json.dumps(record) for record in records) + "\n"
    (args.out / "prompts.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
