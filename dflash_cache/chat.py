"""Chat templates: render, tokenise, and tell the answer from the prompt by their common prefix."""

from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from dflash_cache.errors import UsageError
from dflash_cache.records import Message


class SkippedTurnError(Exception):
    """This turn gives no document; the message is the reason to count it under."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template. `options` go to it as they are (`enable_thinking`, say)."""

    tokenizer: Any
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, where: str) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                f"{where}: the record is a chat, but the tokenizer has no chat template; use a "
                "tokenizer that has one, or text, prompt/response or pre-tokenised records"
            )

    def render(self, messages: list[Message], tools: Any, *, prompt: bool) -> str:
        """The text of a conversation, with the generation prompt or without."""
        if not messages:
            raise SkippedTurnError("an answer without a prompt before it")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise SkippedTurnError(f"chat template error: {str(error)[:120]}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template has written the special tokens already."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt(self, messages: list[Message], tools: Any = None) -> list[int]:
        """Ids of the conversation and the generation prompt: what a server would be given."""
        return self.encode(self.render(messages, tools, prompt=True))

    def answer(self, messages: list[Message], tools: Any = None) -> tuple[list[int], int]:
        """(ids of the conversation, number of leading ids that are prompt).

        The last message is the answer. What the rendered conversation shares with the rendered
        prompt is prompt; the rest is supervised. Templates may end the generation prompt in
        something that the conversation does not repeat (`<think>`), but all before it must be
        shared: a template that rewrites earlier turns raises `SkippedTurnError`.
        """
        prompt_text = self.render(messages[:-1], tools, prompt=True)
        text = self.render(messages, tools, prompt=False)
        prompt_ids, ids = self.encode(prompt_text), self.encode(text)
        shared = common_prefix(prompt_ids, ids)
        if shared == len(prompt_ids):
            return ids, shared
        history = self.encode(self.render(messages[:-1], tools, prompt=False))
        if shared < len(history):
            raise SkippedTurnError("the chat template renders the prompt differently in the answer")
        if text.startswith(prompt_text):
            shared = max(shared, self._tokens_before(text, len(prompt_text), shared))
        return ids, shared

    def _tokens_before(self, text: str, end: int, otherwise: int) -> int:
        """How many tokens of `text` begin before the character `end`.

        A token that straddles the end of the prompt (`\\n\\n`, where the prompt ends in `\\n`) is
        never predicted in serving.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            return otherwise
        encoded = self.tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        return sum(start < end for start, _ in encoded["offset_mapping"])


def common_prefix(left: list[int], right: list[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
