"""Tokenise the demo corpus into one flat stream of ids, small enough to carry to a GPU machine.

Writes OUT/tokens.npz (train_low, train_high, heldout_low, heldout_high: the two bytes of every
uint16 id, apart because they compress better so) and OUT/meta.json. Every document ends with
`<|endoftext|>`; chats are rendered by the tokenizer's template first. `heldout_bytes` counts the
UTF-8 bytes without special tokens, which therefore cost bits and add no bytes.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def documents(path: Path, tokenizer) -> Iterator[str]:
    """The text of every record, chats rendered by the template."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if "text" in record:
                yield record["text"]
            else:
                yield tokenizer.apply_chat_template(record["messages"], tokenize=False)


def plain_bytes(text: str) -> int:
    """UTF-8 bytes of a text without its special tokens."""
    for mark in SPECIAL:
        text = text.replace(mark, "")
    return len(text.encode())


def tokenise(path: Path, tokenizer, limit: int | None) -> tuple[np.ndarray, int, int]:
    """(ids uint16 [n], bytes, documents): documents in file order, up to about `limit` tokens."""
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    parts: list[np.ndarray] = []
    total = size = count = 0
    source = documents(path, tokenizer)
    while (limit is None or total < limit) and (batch := list(islice(source, 512))):
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            parts.append(np.array([*ids, end], dtype=np.uint16))
            total += len(ids) + 1
        size += sum(map(plain_bytes, batch))
        count += len(batch)
    return np.concatenate(parts), size, count


def planes(name: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The low and the high bytes of the ids as two arrays."""
    return {
        f"{name}_low": (ids & 255).astype(np.uint8),
        f"{name}_high": (ids >> 8).astype(np.uint8),
    }


def main() -> None:
    """Tokenise both splits and write them with the tokenizer beside them."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=kind
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of build_corpus.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="at most, for training")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    train, train_bytes, train_documents = tokenise(
        args.corpus / "train.jsonl", tokenizer, args.tokens
    )
    held, held_bytes, held_documents = tokenise(args.corpus / "heldout.jsonl", tokenizer, None)
    args.out.mkdir(parents=True, exist_ok=True)
    arrays = planes("train", train) | planes("heldout", held)
    np.savez_compressed(args.out / "tokens.npz", **arrays)  # type: ignore[arg-type]  # not allow_pickle
    meta = {
        "tokenizer_size": len(tokenizer),
        "train_tokens": len(train),
        "train_bytes": train_bytes,
        "train_documents": train_documents,
        "heldout_tokens": len(held),
        "heldout_bytes": held_bytes,
        "heldout_documents": held_documents,
        "corpus": json.loads((args.corpus / "corpus.json").read_text()),
    }
    (args.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    if args.tokenizer.resolve() != (args.out / "tokenizer").resolve():
        shutil.copytree(args.tokenizer, args.out / "tokenizer", dirs_exist_ok=True)
    size = (args.out / "tokens.npz").stat().st_size / 1e6
    print(
        f"{len(train):,} training tokens, {train_bytes / len(train):.2f} bytes each; {size:.1f} MB"
    )


if __name__ == "__main__":
    main()
