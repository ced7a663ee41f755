"""From a conversation to token ids, and which of them the assistant wrote.

Invariant: the ids are those of transformers' `apply_chat_template(tokenize=True)`. Trained are the
assistant's tokens and the token that ends its turn; never what the template writes behind that.

Where the template has `{% generation %}` blocks they decide, as in transformers. Otherwise a turn
begins where the prompt for it ends (the messages before it, rendered with the generation prompt),
so that training sees the tokens that generation starts from.

    encode_conversation(tokenizer, templates, messages).trained
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from moe_train.errors import TrainValueError
from moe_train.tokenization.template import ChatTemplates, Rendered

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

_REMEDY = (
    "mark what the assistant writes with {% generation %} ... {% endgeneration %} in a copy of the "
    "template and name it by tokenizer.chat_template"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokens:
    """A conversation as tokens.

    Attributes:
        ids: int64 [N].
        trained: bool [N]; True where the token is a target: an assistant's, with weight 1.
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]


def encode_conversation(
    tokenizer: Tokenizer, templates: ChatTemplates, messages: Sequence[Message], tools: Tools
) -> ChatTokens:
    """Tokens of a conversation.

    Args:
        messages: each has `role`, mostly `content`, and for assistants `weight` 0 or 1 if it likes.

    Raises:
        ValueError: the template refuses the conversation, or does not tell what the assistant
            wrote; the message has the number of the message, from 1.
    """
    weights = [_weight(number, message) for number, message in enumerate(messages, start=1)]
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    rendered = templates.render(plain, tools=tools)
    tokenizer.encode_special_tokens = False
    encoding = tokenizer.encode(rendered.text, add_special_tokens=False)
    turns = [n for n, message in enumerate(plain) if message["role"] == "assistant"]
    if templates.marks_generation(tools):
        spans = _marked(encoding, rendered)
        if len(spans) != len(turns) and 0 in (weights[n] for n in turns):
            raise TrainValueError(
                f"the chat template marks {len(spans)} turns of {len(turns)} assistant messages, "
                "so a weight of 0 has no place; put each assistant message into one "
                "{% generation %} block"
            )
        kept = [True] * len(spans) if len(spans) != len(turns) else [weights[n] == 1 for n in turns]
    else:
        spans = _Turns(tokenizer, templates, plain, tools, rendered.text, encoding).spans(turns)
        kept = [weights[n] == 1 for n in turns]
    trained = np.zeros(len(encoding.ids), dtype=np.bool_)
    for (first, end), keep in zip(spans, kept, strict=True):
        trained[first:end] = keep
    return ChatTokens(ids=np.array(encoding.ids, dtype=np.int64), trained=trained)


def _weight(number: int, message: Message) -> int:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TrainValueError(f"message {number} is {message!r}; expected an object with a role")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise TrainValueError(
            f"message {number} has weight={weight!r}; expected 1, or 0 to leave it out of the loss"
        )
    return int(weight)


def _marked(encoding: Encoding, rendered: Rendered) -> list[tuple[int, int]]:
    """Token ranges of the `{% generation %}` blocks, as transformers finds them."""
    spans = []
    for first_char, end_char in rendered.spans:
        # A token may leave out the space before it; the block then begins with that token.
        chars = range(first_char, end_char)
        found = (encoding.char_to_token(char) for char in chars)
        first = next((token for token in found if token is not None), None)
        backwards = (encoding.char_to_token(char) for char in reversed(chars))
        last = next((token for token in backwards if token is not None), None)
        spans.append((0, 0) if first is None or last is None else (first, last + 1))
    return spans


class _Turns:
    """Finds the assistant's turns in a conversation whose template does not mark them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        messages: Sequence[Message],
        tools: Tools,
        text: str,
        encoding: Encoding,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._messages = messages
        self._tools = tools
        self._text = text
        self._ids, self._offsets = encoding.ids, encoding.offsets
        self._starts = [start for start, _ in self._offsets]
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {token_id for token_id, token in added if token.special}

    def spans(self, turns: Sequence[int]) -> list[tuple[int, int]]:
        """Token ranges of the turns, each with the token that ends it."""
        prompts = [self._prompt_end(turn) for turn in turns]
        limits = [*prompts, len(self._text)][1:]
        return [
            self._span(turn, first, limit)
            for turn, first, limit in zip(turns, prompts, limits, strict=True)
        ]

    def _prompt_end(self, turn: int) -> int:
        """The character behind the prompt of a turn."""
        try:
            prompt = self._templates.render(
                self._messages[:turn], tools=self._tools, add_generation_prompt=True
            ).text
        except TrainValueError as error:
            raise TrainValueError(
                f"message {turn + 1}: no prompt can be made of the messages before it ({error}); "
                f"{_REMEDY}"
            ) from error
        if not self._text.startswith(prompt):
            raise TrainValueError(
                f"message {turn + 1}: the chat template writes another text for the messages "
                f"before it when it prompts for this one; {_REMEDY}"
            )
        return len(prompt)

    def _span(self, turn: int, first: int, limit: int) -> tuple[int, int]:
        alone = self._templates.render(self._messages[: turn + 1], tools=self._tools).text
        begin = self._first_token(first)
        stop = bisect_left(self._starts, limit)
        if self._text.startswith(alone):
            return begin, self._trimmed(begin, bisect_left(self._starts, len(alone)))
        end = self._end_of(alone, begin, stop)
        if end is None:
            raise TrainValueError(
                f"message {turn + 1}: the chat template does not tell where this turn ends, since "
                f"it writes it differently once other messages follow; {_REMEDY}"
            )
        return begin, end

    def _first_token(self, char: int) -> int:
        """The first token behind `char`; also an end token that takes white space before it."""
        token = bisect_left(self._starts, char)
        if token and self._ids[token - 1] in self._special:
            behind = self._text[char : self._offsets[token - 1][1]]
            return token - 1 if behind.strip() else token
        return token

    def _trimmed(self, begin: int, end: int) -> int:
        """The end of a turn without the white space that the template writes behind it."""
        special = [n for n in range(begin, end) if self._ids[n] in self._special]
        if not special:
            return end
        behind = self._text[self._offsets[special[-1]][1] : self._offsets[end - 1][1]]
        return end if behind.strip() else special[-1] + 1

    def _end_of(self, alone: str, begin: int, stop: int) -> int | None:
        """The end of a turn that is written otherwise when it stands last (as `alone`).

        Either only its end token differs (GPT-OSS), or its beginning does (Qwen3 leaves out the
        reasoning of earlier turns) and the end token is the same.
        """
        encoding = self._tokenizer.encode(alone, add_special_tokens=False)
        last = max((n for n, i in enumerate(encoding.ids) if i in self._special), default=None)
        if last is None:
            return None
        end_char = encoding.offsets[last][0]
        candidates = range(begin, stop)
        if self._text.startswith(alone[:end_char]):
            return next(self._special_from(candidates, end_char), None)
        same = (n + 1 for n in candidates if self._ids[n] == encoding.ids[last])
        return next(same, None)

    def _special_from(self, candidates: range, char: int) -> Iterator[int]:
        """The place behind the special token that begins at `char`."""
        at = takewhile(lambda n: self._starts[n] <= char, candidates)
        return (n + 1 for n in at if self._starts[n] == char and self._ids[n] in self._special)
