"""Regenerate the drafter's training data: the demo target's own greedy continuations.

Prompts are cut to a few exact lengths and batched by length, since a hybrid must not be padded on
the left. Text prompts are prefixes of corpus pieces; chat prompts lose the end of the user's text
until they have one of the lengths. Writes {"input_ids", "loss_mask", "prompt_length"} lines, the
mask 1 on what was generated, the stop token included. `--only-prompts` writes the prompts to an
.npz file instead (no model runs), which `--prompts` reads on the GPU machine.
"""

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from batch_decode import BatchDecoder
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

TEXT_LENGTHS = (32, 64, 128)
CHAT_LENGTHS = tuple(range(36, 133, 12))


def chat_prompt(messages: list[dict], tokenizer) -> list[int] | None:
    """Ids up to the assistant's answer, the user's text cut to reach one of CHAT_LENGTHS."""
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    length = max((n for n in CHAT_LENGTHS if n <= len(ids)), default=0)
    end = len(ids) - 1 - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    kept = ids[: end - (len(ids) - length)] + ids[end:]
    return kept if length else None


def text_prompt(text: str, turn: int, tokenizer) -> list[int] | None:
    """The first 32, 64 or 128 ids by turns; None for a text that is hardly longer."""
    length = TEXT_LENGTHS[turn % len(TEXT_LENGTHS)]
    ids = tokenizer(text[: 12 * length], add_special_tokens=False)["input_ids"]
    return ids[:length] if len(ids) >= length + 16 else None


def make_prompts(data: Path, tokenizer, count: int, chat_share: float) -> dict[str, np.ndarray]:
    """{"chat_36": [n, 36], ..} uint16: the first records that fit, distinct, in the share asked."""
    wanted = {"chat": round(count * chat_share), "text": count - round(count * chat_share)}
    found: dict[str, set[tuple[int, ...]]] = {"chat": set(), "text": set()}
    with data.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            kind = "text" if "text" in record else "chat"
            if len(found[kind]) >= wanted[kind]:
                continue
            if kind == "text":
                ids = text_prompt(record["text"], len(found["text"]), tokenizer)
            else:
                ids = chat_prompt(record["messages"], tokenizer)
            if ids:
                found[kind].add(tuple(ids))
    return group(found)


def group(found: dict[str, set[tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Prompts by kind and length, in a stable order that mixes sources."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for kind, prompts in found.items():
        for prompt in sorted(prompts, key=lambda p: (p[-1], p[::-1])):
            groups.setdefault(f"{kind}_{len(prompt)}", []).append(prompt)
    mixed = np.random.default_rng(0)
    return {
        name: mixed.permutation(np.array(prompts, dtype=np.uint16))
        for name, prompts in sorted(groups.items())
    }


def limit(prompts: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The same share of every group, `count` prompts in all."""
    total = sum(map(len, prompts.values()))
    share = min(1.0, count / total)
    return {name: rows[: max(1, round(share * len(rows)))] for name, rows in prompts.items()}


def cut_repetition(ids: list[int], width: int = 16, most: int = 4) -> int:
    """How many tokens to keep: up to where a run of `width` tokens comes for the fifth time."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(ids) - width + 1):
        run = tuple(ids[i : i + width])
        seen[run] = seen.get(run, 0) + 1
        if seen[run] > most:
            return i
    return len(ids)


def generate(
    model: Qwen3_5ForCausalLM, prompts: dict[str, np.ndarray], args: argparse.Namespace
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, continuation with its stop token) of every prompt, greedily."""
    longest = max(rows.shape[1] for rows in prompts.values())
    decoder = BatchDecoder(model, args.batch, longest + args.max_new_tokens)
    for name, rows in prompts.items():
        for first in range(0, len(rows), args.batch):
            ids = torch.from_numpy(rows[first : first + args.batch].astype(np.int64))
            made = decoder.generate(ids.to(model.device), args.max_new_tokens).tolist()
            print(f"{name}: {first + len(made)}/{len(rows)}", flush=True)
            yield from zip(ids.tolist(), (until_stop(m, args.stops) for m in made), strict=True)


def until_stop(ids: list[int], stops: list[int]) -> list[int]:
    """The ids up to and with the first stop token."""
    ends = [i for i, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def write(path: Path, documents: Iterator[tuple[list[int], list[int]]]) -> dict:
    """Write the lines (gzip when the name ends in .gz); returns the counts."""
    counts = {"documents": 0, "prompt_tokens": 0, "generated": 0, "stopped": 0, "cut": 0, "kept": 0}
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        for prompt, answer in documents:
            keep = cut_repetition(answer)
            counts["documents"] += 1
            counts["prompt_tokens"] += len(prompt)
            counts["generated"] += len(answer)
            counts["cut"] += keep < len(answer)
            counts["kept"] += keep
            counts["stopped"] += answer[-1] in (0, 2)
            mask = [0] * len(prompt) + [1] * keep
            line = {
                "input_ids": prompt + answer[:keep],
                "loss_mask": mask,
                "prompt_length": len(prompt),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return counts


def load(args: argparse.Namespace) -> Qwen3_5ForCausalLM:
    """The target on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    return Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()


def parse_args() -> argparse.Namespace:
    """The command line."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=kind
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="target (or, for prompts, tokenizer) folder")
    add("--data", type=Path, help="train.jsonl or heldout.jsonl to take prompts from")
    add("--prompts", type=Path, help="prompts.npz of --only-prompts, instead of --data")
    add("--heldout", action="store_true", help="take DATA's neighbour heldout.jsonl")
    add("--out", type=Path, required=True, help="lines (.jsonl, .jsonl.gz) or prompts (.npz)")
    add("--only-prompts", action="store_true", help="write the prompts and stop")
    add("--documents", type=int, default=24_000, help="prompts to use")
    add("--chat-share", type=float, default=0.4, help="share of chats among them")
    add("--batch", type=int, default=2048, help="prompts generated together")
    add("--max-new-tokens", type=int, default=256, help="longest continuation")
    add("--dtype", choices=("bfloat16", "float32"), default="float32", help="of the target")
    args = parser.parse_args()
    if (args.data is None) == (args.prompts is None):
        parser.error("give exactly one of --data and --prompts")
    if args.heldout and args.data:
        args.data = args.data.with_name("heldout.jsonl")
    return args


def main() -> None:
    """Make or read prompts, generate, write, report."""
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    args.stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    if args.data:
        prompts = make_prompts(args.data, tokenizer, args.documents, args.chat_share)
    else:
        with np.load(args.prompts) as file:
            prompts = limit({name: file[name] for name in file.files}, args.documents)
    print({name: len(rows) for name, rows in prompts.items()}, flush=True)
    if args.only_prompts:
        np.savez_compressed(args.out, **prompts)  # type: ignore[arg-type]  # not allow_pickle
        return
    model, start = load(args), time.time()
    counts = write(args.out, generate(model, prompts, args))
    seconds = time.time() - start
    print(json.dumps(counts), f"| {counts['generated'] / seconds:,.0f} generated tokens/s")


if __name__ == "__main__":
    main()
