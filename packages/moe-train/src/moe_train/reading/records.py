"""Conversations, preference pairs and embedding pairs: checked, and brought into one form.

Invariant: what leaves this module is plain: messages are dicts with a text `role` and a text
`content`, without fields that are null (Parquet has every field in every message).

    talk = conversation({"messages": [{"role": "user", "content": "Hi"}]}, "messages", "line 1")
    talk.messages[0]["content"]
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_train.errors import TrainValueError
from moe_train.reading.arrays import ATTENTION, LABELS, MASK_FIELD
from moe_train.reading.rows import field_of

_SHAREGPT_FIELD = "conversations"
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NEGATIVES = ("negative", "negatives")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of one conversation, and the tools that its template is told of."""

    messages: list[Message]
    tools: list[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt: conversations with the prompt in front, or a prompt and texts."""

    prompt: str
    chosen: Conversation | str
    rejected: Conversation | str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPair:
    """A text, one that belongs to it, and any number that do not."""

    anchor: str
    positive: str
    negatives: tuple[str, ...]


def columns_of(kind: str, field: str) -> tuple[str, ...]:
    """The top fields of a row that this kind reads, the needed one first."""
    if kind == "chat":
        return (field.split(".")[0], _SHAREGPT_FIELD, "tools")
    if kind == "preference":
        return ("chosen", "rejected", "prompt", "tools")
    if kind == "embedding":
        return ("anchor", "positive", *_NEGATIVES)
    if kind == "tokens":
        return (field, field.split(".")[0], MASK_FIELD, LABELS, ATTENTION)
    return (field, field.split(".")[0])


def conversation(value: Mapping[str, Any], field: str, place: str) -> Conversation:
    """The conversation of a row: messages in `field`, or ShareGPT's `conversations`.

    Raises:
        ValueError: a message is not one; names the place, the message and what is expected.
    """
    if field == "messages" and field not in value and _SHAREGPT_FIELD in value:
        field = _SHAREGPT_FIELD
    found = field_of(value, field, place)
    return Conversation(messages=_messages(found, f"{place}, {field}"), tools=_tools(value, place))


def preference(value: Mapping[str, Any], place: str) -> Preference:
    """A row with `chosen` and `rejected`, both texts or both lists of messages, and `prompt`.

    Raises:
        ValueError: a part is missing or of another form.
    """
    chosen, rejected = (field_of(value, name, place) for name in ("chosen", "rejected"))
    prompt = value.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, str | None):
            raise _wrong(place, "prompt", prompt, "text, as chosen and rejected are")
        _check_differ(chosen, rejected, place)
        return Preference(prompt=prompt or "", chosen=chosen, rejected=rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise TrainValueError(f"{place}: chosen and rejected must both be texts or both messages")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = [] if prompt is None else _messages(prompt, f"{place}, prompt")
    tools = _tools(value, place)
    answers = [
        Conversation(messages=before + _messages(part, f"{place}, {name}"), tools=tools)
        for name, part in (("chosen", chosen), ("rejected", rejected))
    ]
    _check_differ(answers[0].messages, answers[1].messages, place)
    return Preference(prompt="", chosen=answers[0], rejected=answers[1])


def embedding_pair(value: Mapping[str, Any], place: str) -> EmbeddingPair:
    """A row with `anchor`, `positive` and perhaps `negative` or `negatives`.

    Raises:
        ValueError: a part is missing, empty or no text.
    """
    anchor, positive = (_filled_text(value, name, place) for name in ("anchor", "positive"))
    negatives: list[str] = []
    for name in _NEGATIVES:
        given = value.get(name)
        for text in given if isinstance(given, list) else [] if given is None else [given]:
            if not isinstance(text, str) or not text:
                raise _wrong(place, name, text, "a text that is not empty, or a list of such")
            negatives.append(text)
    return EmbeddingPair(anchor=anchor, positive=positive, negatives=tuple(negatives))


def _check_differ(chosen: Any, rejected: Any, place: str) -> None:
    if chosen == rejected:
        raise TrainValueError(f"{place}: chosen and rejected are the same; take the pair out")


def _filled_text(value: Mapping[str, Any], name: str, place: str) -> str:
    text = field_of(value, name, place)
    if not isinstance(text, str) or not text:
        raise _wrong(place, name, text, "a text that is not empty")
    return text


def _messages(found: Any, place: str) -> list[Message]:
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TrainValueError(f"{place} holds {_shown(found)}, expected a list of messages")
    return [_message(item, f"{place}[{index}]") for index, item in enumerate(found)]


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise TrainValueError(
            f'{place} holds {_shown(item)}, expected {{"role": ..., "content": ...}}'
        )
    message = {name: _without_nulls(part) for name, part in item.items() if part is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        message["content"] = message.pop("value", None)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(place, "role", role, f"one of {', '.join(_ROLES)}")
    close = difflib.get_close_matches(role, _ROLES, n=1, cutoff=0.75)
    if close and role not in _ROLES:
        raise TrainValueError(f"{place} has the role {role!r}; did you mean {close[0]!r}?")
    message["content"] = _content(message.get("content"), message, place)
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise _wrong(place, "weight", weight, "0 (no target) or 1")
    if "weight" in message:
        message["weight"] = int(weight)
    return message


def _content(content: Any, message: Message, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text" or not isinstance(text, str):
                raise _wrong(place, "content", part, 'parts {"type": "text", "text": ...} only')
            texts.append(text)
        return "".join(texts)
    raise _wrong(place, "content", content, "text or a list of text parts")


def _tools(value: Mapping[str, Any], place: str) -> list[Any] | None:
    tools = value.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise TrainValueError(f"{place}: tools is text that is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _wrong(place, "tools", tools, "a list, or a list written as JSON")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """The value without null fields of structures, which Parquet adds."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _wrong(place: str, name: str, found: Any, expected: str) -> TrainValueError:
    return TrainValueError(f"{place}: {name} is {_shown(found)}, expected {expected}")


def _shown(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{type(found).__name__} {text[:50]}..."
