"""Which tokens end a text: one answer, from the tokenizer, config.json and generation_config.json.

Invariant: what ends a document in the training data also ends a generated text. Of a pretrained
model a contradiction is refused; of a model that is made anew its config.json is written to agree.

    ends = end_tokens(tokenizer, named, NamedIds(config=(2,), generation=(2, 7)), pretrained=True)
    ends.document_end_id, ends.eos_token_ids, ends.pad_token_id
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from moe_train.errors import TrainValueError

_DECIDE = 'set tokenizer.eos_token to the token that ends a text, such as tokenizer.eos_token="{}"'
# Of a tokenizer.json alone, which names no tokens: what families call their end token.
_USUAL = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "[SEP]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedIds:
    """End tokens that config.json and generation_config.json name; empty where there are none."""

    config: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Those of both files, each once."""
        return tuple(dict.fromkeys((*self.config, *self.generation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """What ends a document, every token that ends a generated text, and what fills a batch."""

    document_end_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def token_ids_of(values: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    """One id or a list of them; empty where there is none.

    Raises:
        ValueError: the value is neither.
    """
    given = values.get(key)
    ids = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise TrainValueError(f"{source}: {key}={given!r}; expected an integer or a list of them")
    return ids


def end_tokens(
    tokenizer: Tokenizer,
    named: Mapping[str, str],
    ids: NamedIds,
    *,
    pretrained: bool,
    decided: str | None = None,
) -> EndTokens:
    """Hold the end tokens of tokenizer and model against each other.

    Args:
        named: the tokenizer's special tokens by role, such as `eos_token`.
        ids: what the model's files name.
        pretrained: the model was trained with these ids, so they have to be right; otherwise those
            that are no special tokens of the tokenizer are left out.
        decided: the user's `tokenizer.eos_token`.

    Raises:
        ValueError: they contradict each other, an id is no token, or there is no end token.
    """
    own = _own_end(tokenizer, named, decided)
    files = [ids.config, ids.generation]  # one without the own end token is of another tokenizer
    agreeing = tuple(i for file in files if own is None or own in file for i in file)
    if decided is not None and own is not None:
        every = (own, *agreeing)
    elif pretrained:
        _refuse_contradictions(tokenizer, named, own, ids)
        every = (*(() if own is None else (own,)), *ids.all)
    else:
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        every = (*(() if own is None else (own,)), *(i for i in agreeing if i in special))
    first = (every or _usual_end(tokenizer))[0]
    ordered = (first, *sorted({*every} - {first}))
    pad = named.get("pad_token")
    pad_id = None if pad is None else tokenizer.token_to_id(pad)
    return EndTokens(
        document_end_id=first,
        eos_token_ids=ordered,
        pad_token_id=first if pad_id is None else pad_id,
    )


def _own_end(tokenizer: Tokenizer, named: Mapping[str, str], decided: str | None) -> int | None:
    """The id of the end token that the user or else the tokenizer names."""
    token = named.get("eos_token") if decided is None else decided
    if token is None:
        return None
    own = tokenizer.token_to_id(token)
    if own is None:
        source = "eos_token of the tokenizer" if decided is None else "tokenizer.eos_token"
        raise TrainValueError(
            f"{source} is {token!r}, which is no token of its tokenizer.json; name one that is in "
            "it, or add it by tokenizer.new_tokens"
        )
    return int(own)


def _refuse_contradictions(
    tokenizer: Tokenizer, named: Mapping[str, str], own: int | None, ids: NamedIds
) -> None:
    for source, given in (("config.json", ids.config), ("generation_config.json", ids.generation)):
        for token_id in given:
            if tokenizer.id_to_token(token_id) is None:
                raise TrainValueError(
                    f"{source} names eos_token_id={token_id}, which is no token of the tokenizer "
                    f"({tokenizer.get_vocab_size()} tokens); "
                    + _DECIDE.format(named.get("eos_token", "</s>"))
                )
    if own is not None and ids.all and own not in ids.all:
        raise TrainValueError(
            f"the tokenizer's eos_token is {named['eos_token']!r} ({own}), but the model's files "
            f"name eos_token_id={describe(tokenizer, ids.all)}; "
            + _DECIDE.format(named["eos_token"])
        )
    if ids.config and ids.generation and not set(ids.config) & set(ids.generation):
        raise TrainValueError(
            f"config.json names eos_token_id={describe(tokenizer, ids.config)} and "
            f"generation_config.json {describe(tokenizer, ids.generation)}; "
            + _DECIDE.format(tokenizer.id_to_token(ids.generation[0]))
        )


def describe(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    """Ids with their tokens, for a message."""
    return ", ".join(f"{each} ({tokenizer.id_to_token(each)!r})" for each in ids)


def _usual_end(tokenizer: Tokenizer) -> tuple[int, ...]:
    for token in _USUAL:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return (int(token_id),)
    raise TrainValueError(
        "the tokenizer has no end-of-text token: neither it nor config.json names one, and it has "
        f"none of {', '.join(_USUAL)}; " + _DECIDE.format("</s>")
    )
