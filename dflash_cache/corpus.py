"""JSONL -> Document(token ids, loss mask). Chat templates live here (see `chat`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cache.chat import Chat, SkippedTurnError, common_prefix
from dflash_cache.errors import DataError, UsageError
from dflash_cache.records import SHAPES, Record, read_records

Encoded = tuple[list[int], list[int]]  # ids, loss mask


@dataclass(frozen=True)
class Document:
    """One training document.

    `input_ids` int32 [L]; `loss_mask` uint8 [L], 1 where the token is supervised; `source` the
    name of the file it came from (no folder); `line` its 1-based line; `record` the sha256 hex of
    the source record's canonical JSON (all documents of a conversation share it: the split's key).
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    line: int
    record: str


@dataclass(frozen=True)
class CorpusReport:
    """What was read. `skipped`: reason -> lines (a line once for each of its skipped turns)."""

    documents: int
    tokens: int
    supervised: int
    skipped: dict[str, list[int]]


@dataclass(frozen=True)
class Prompt:
    """A prompt to decode from: `input_ids` int32 [n], n >= 1; `line` 1-based."""

    input_ids: np.ndarray
    line: int


def load_tokenizer(model: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The tokenizer of a model folder or hub id; `UsageError` if there is none."""
    # These take seconds, and reading a cache does not need them.
    from transformers import AutoTokenizer

    from dflash_cache.identity import check_config_file

    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise UsageError(f"{model}: there is no such folder; give a model folder or a hub id")
    check_config_file(Path(model).expanduser())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(model).expanduser()) if model.startswith("~") else model,
            trust_remote_code=trust_remote_code,
            revision=revision or "main",
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if not _has_tokenizer_files(Path(model).expanduser()):
            raise _no_tokenizer(model) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{model}: the tokenizer cannot be loaded ({reason})") from error
    # Without its files transformers makes an empty one of the class that config.json implies.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise _no_tokenizer(model)
    return tokenizer


def _has_tokenizer_files(folder: Path) -> bool:
    patterns = ("*token*", "vocab*", "*.model", "tekken.json")
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in patterns)


def _no_tokenizer(model: str) -> UsageError:
    return UsageError(
        f"the model folder {model} has no tokenizer (tokenizer.json): copy the model's "
        "tokenizer files there"
    )


def read_corpus(
    path: Path,
    tokenizer: Any,
    *,
    report_progress: Callable[[int], object] | None = None,
    template_options: dict[str, Any] | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Document], CorpusReport]:
    """All documents of a JSONL file, in its order, and what was skipped.

    A line is one of: `{"text"}` (all supervised), `{"messages": [{role, content}]}` or
    `{"conversations": [{from, value}]}` (one document per assistant turn, that turn supervised),
    `{"prompt", "response"}` (the response supervised; a string prompt is taken as it stands, a
    list of messages goes through the chat template), `{"input_ids", "loss_mask"}` (as given).
    `report_progress` gets the bytes of each line; `template_options` go to the chat template.

    Skipped and counted: turns whose template fails or rewrites the prompt, conversations without
    an assistant turn, documents of fewer than 2 tokens. Raises `UsageError` for a missing file,
    `DataError` with file and line for broken JSON, an unknown shape, ids outside of
    [0, `vocab_size`) (default: the tokenizer's), and for a file without any document.
    """
    reader = _Reader(Chat(tokenizer, template_options or {}), vocab_size or len(tokenizer))
    documents: list[Document] = []
    skipped: dict[str, list[int]] = {}
    for record in read_records(Path(path), report_progress):
        digest = record.digest()
        for item in reader.documents(record):
            reason = item if isinstance(item, str) else _reason_to_skip(item)
            if reason:
                skipped.setdefault(reason, []).append(record.line)
            elif not isinstance(item, str):
                documents.append(_document(item, Path(path).name, record.line, digest))
    if not documents:
        reasons = "; ".join(f"{reason} ({len(lines)})" for reason, lines in skipped.items())
        raise DataError(f"{path}: no record gave a document: {reasons}")
    tokens = sum(len(d.input_ids) for d in documents)
    supervised = sum(int(d.loss_mask.sum()) for d in documents)
    return documents, CorpusReport(len(documents), tokens, supervised, skipped)


def _reason_to_skip(item: Encoded) -> str | None:
    return "fewer than 2 tokens" if len(item[0]) < 2 else None


def _document(item: Encoded, source: str, line: int, record: str) -> Document:
    ids, mask = item
    return Document(
        np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8), source, line, record
    )


def _masked(ids: list[int], prompt: int) -> Encoded:
    return ids, [0] * prompt + [1] * (len(ids) - prompt)


@dataclass(frozen=True)
class _Reader:
    """Turns one record into its documents; a string in place of one is the reason it is skipped."""

    chat: Chat
    vocab_size: int

    def documents(self, record: Record) -> Iterator[Encoded | str]:
        record.check_one_shape()
        for item in self._shape(record):
            if not isinstance(item, str) and item[0] and max(item[0]) >= self.vocab_size:
                raise DataError(
                    f"{record.where}: token id {max(item[0])} is not in [0, {self.vocab_size})"
                )
            yield item

    def _shape(self, record: Record) -> Iterator[Encoded | str]:
        fields = record.fields
        if "input_ids" in fields:
            yield self._tokenised(record)
        elif "messages" in fields or "conversations" in fields:
            yield from self._turns(record, "messages" if "messages" in fields else "conversations")
        elif "prompt" in fields and "response" in fields:
            yield self._prompt_response(record)
        elif "text" in fields:
            ids = self.plain(record.text("text"))
            yield _masked(ids, 0)
        else:
            raise _unknown_shape(record)

    def plain(self, text: str) -> list[int]:
        return self.chat.tokenizer(text, verbose=False)["input_ids"]

    def _tokenised(self, record: Record) -> Encoded:
        ids = record.integers("input_ids", self.vocab_size)
        if "loss_mask" not in record.fields:
            raise DataError(f'{record.where}: "input_ids" needs a "loss_mask" beside it')
        mask = record.integers("loss_mask", 2, booleans=True)
        if len(ids) != len(mask):
            raise DataError(
                f'{record.where}: "input_ids" has {len(ids)} entries, "loss_mask" {len(mask)}'
            )
        return ids, mask

    def _turns(self, record: Record, key: str) -> Iterator[Encoded | str]:
        self.chat.check(record.where)
        messages = record.messages(key)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not answers:
            yield "no assistant turn"
        for i in answers:
            yield self._answer(messages[: i + 1], record)

    def _answer(self, messages: list[dict[str, Any]], record: Record) -> Encoded | str:
        try:
            ids, prompt = self.chat.answer(messages, record.fields.get("tools"))
        except SkippedTurnError as reason:
            return str(reason)
        return "the answer is empty" if prompt == len(ids) else _masked(ids, prompt)

    def _prompt_response(self, record: Record) -> Encoded | str:
        response = record.text("response")
        if isinstance(record.fields["prompt"], str):
            prompt = record.text("prompt")
            ids = self.plain(prompt + response)
            return _masked(ids, common_prefix(self.plain(prompt), ids))
        self.chat.check(record.where)
        messages = record.messages("prompt")
        return self._answer([*messages, {"role": "assistant", "content": response}], record)


def _unknown_shape(record: Record) -> DataError:
    keys = ", ".join(record.fields) or "none"
    return DataError(f"{record.where}: the keys are {keys}; expected one of {SHAPES}")


def read_prompts(
    path: Path,
    tokenizer: Any,
    *,
    template_options: dict[str, Any] | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """The prompts of a JSONL file, to decode from.

    `{"text"}` and a string `{"prompt"}` are taken as they stand; a chat is rendered up to its last
    assistant turn (or whole, without one) with the generation prompt; `{"input_ids"}` as given, up
    to `prompt_length` if there is one. Errors as for `read_corpus`; a prompt that is empty or that
    the template refuses is a `DataError` with file and line.
    """
    reader = _Reader(Chat(tokenizer, template_options or {}), vocab_size or len(tokenizer))
    prompts = []
    for record in read_records(Path(path)):
        try:
            ids = _prompt_ids(reader, record)
        except SkippedTurnError as reason:
            raise DataError(f"{record.where}: {reason}") from reason
        if not ids:
            raise DataError(f"{record.where}: the prompt is empty")
        prompts.append(Prompt(np.array(ids, dtype=np.int32), record.line))
    return prompts


def _prompt_ids(reader: _Reader, record: Record) -> list[int]:
    record.check_one_shape()
    fields = record.fields
    if "input_ids" in fields:
        ids = record.integers("input_ids", reader.vocab_size)
        return ids and ids[: _prompt_length(record, len(ids))]
    for key in ("messages", "conversations", "prompt"):
        if key in fields and not isinstance(fields[key], str):
            reader.chat.check(record.where)
            return reader.chat.prompt(_before_answer(record.messages(key)), fields.get("tools"))
    if "prompt" in fields or "text" in fields:
        return reader.plain(record.text("prompt" if "prompt" in fields else "text"))
    raise _unknown_shape(record)


def _prompt_length(record: Record, length: int) -> int:
    value = record.fields.get("prompt_length", length)
    if type(value) is not int or not 1 <= value <= length:
        raise DataError(f'{record.where}: "prompt_length" is {value!r}, not in 1..{length}')
    return value


def _before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1]] if answers else messages
