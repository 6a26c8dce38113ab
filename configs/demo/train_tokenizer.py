"""Train the demo target's tokenizer: a small byte-level BPE with a ChatML-like template.

Reads the JSONL of build_corpus.py and writes a Hugging Face tokenizer folder (tokenizer.json,
tokenizer_config.json, chat_template.jinja). `<|endoftext|>` ends documents and is the padding,
`<|im_end|>` ends chat turns and is the end-of-sequence token.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# One leading character may join a word (" return", "_name"); digits stay single; punctuation takes
# the newline after it; a run of spaces leaves its last one to the next word, so each depth of
# indentation is one token.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def texts(path: Path) -> Iterator[str]:
    """The strings of a JSONL corpus: texts, and the role and content of chat turns."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if "text" in record:
                yield record["text"]
            for message in record.get("messages", []):
                yield f"{message['role']}\n{message['content']}"


def train(data: Path, vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Write the folder that AutoTokenizer reads."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Train, save, and print how far the tokens reach."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=kind
    )
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of build_corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="tokenizer folder to write")
    parser.add_argument("--vocab", type=int, default=3072, help="entries, special ones included")
    parser.add_argument("--max-length", type=int, default=4096, help="model_max_length")
    args = parser.parse_args()
    tokenizer = train(args.data, args.vocab)
    save(tokenizer, args.out, args.max_length)
    print(f"{tokenizer.get_vocab_size()} tokens in {args.out}")


if __name__ == "__main__":
    main()
