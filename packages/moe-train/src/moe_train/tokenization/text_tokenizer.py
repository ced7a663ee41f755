"""A tokenizer with all that belongs to it: special tokens, end tokens, chat templates, its files.

Invariant: `files` say everything: `load_tokenizer` of a folder that holds them gives an equal
tokenizer, and transformers' `AutoTokenizer` gives the same ids, prompts and end tokens.

    tokenizer = TextTokenizer(files, ends)
    tokenizer.encode_prompt("Hi"), tokenizer.eos_token_ids
    tokenizer.encode_chat([{"role": "user", "content": "Hi"}, answer]).trained
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from moe_train.errors import TrainValueError
from moe_train.tokenization.chat import ChatTokens, encode_conversation
from moe_train.tokenization.end_tokens import EndTokens, NamedIds, token_ids_of
from moe_train.tokenization.folder import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_json,
)
from moe_train.tokenization.template import ChatTemplates, templates_in

CONFIG = "config.json"


class TextTokenizer:
    """Text to ids and back; never changed once it is made.

    Attributes:
        files: every file that a checkpoint has to carry, by name.
        vocab_size: ids are below it; added tokens included.
        begin_ids: come before a document.
        document_end_id: ends a document in a token file.
        eos_token_ids: every token that ends a generated text, `document_end_id` first.
        pad_token_id: fills a batch.
    """

    __slots__ = (
        "_templates",
        "_tokenizer",
        "begin_ids",
        "document_end_id",
        "eos_token_ids",
        "files",
        "pad_token_id",
        "vocab_size",
    )

    def __init__(
        self, files: Mapping[str, bytes], ends: EndTokens, parsed: Tokenizer | None = None
    ) -> None:
        """Args: `parsed` is what `parse_tokenizer` makes of the files, if it was made already."""
        self.files: Mapping[str, bytes] = MappingProxyType(dict(files))
        self._tokenizer = parse_tokenizer(files) if parsed is None else parsed
        self._templates = ChatTemplates(templates_in(files), named_tokens(files))
        self.begin_ids = _begin_ids(self._tokenizer, ends)
        self.document_end_id = ends.document_end_id
        self.eos_token_ids = ends.eos_token_ids
        self.pad_token_id = ends.pad_token_id
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        ends = EndTokens(
            document_end_id=self.document_end_id,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
        )
        return TextTokenizer, (dict(self.files), ends)

    @property
    def fingerprint(self) -> str:
        """Hex digits of what changes ids, prompts or special tokens."""
        parts = [
            json.loads(self.files[TOKENIZER]),
            templates_in(self.files),
            named_tokens(self.files),
            [self.document_end_id, self.eos_token_ids, self.pad_token_id],
        ]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text as a document, int64 [N], without its end; runs on all cores.

        A document begins as in transformers' `tokenizer(text)`, with a BOS token where that adds
        one. Text that looks like a special token stays text.
        """
        found = self._plain_ids(texts)
        return [np.array([*self.begin_ids, *ids], dtype=np.int64) for ids in found]

    def encode_rest(self, text: str) -> NDArray[np.int64]:
        """Token ids of lines that go on with a document, int64 [N].

        They are encoded behind the end of a line, which is taken off again: Llama's and Mixtral's
        tokenizers begin a word ("▁") before any text, which is right at its beginning alone.
        """
        line, behind = self._plain_ids(["\n", f"\n{text}"])
        fits = behind[: len(line)] == line  # not where "\n\n" is one token
        ids = behind[len(line) :] if fits else self._plain_ids([text])[0]
        return np.array(ids, dtype=np.int64)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that transformers' `tokenizer(text)` gives: special tokens are read and added.

        Args:
            add_special_tokens: False for a text of `render_chat`, which holds all of them.
        """
        self._tokenizer.encode_special_tokens = False
        whole = whole_text(text)
        return list(self._tokenizer.encode(whole, add_special_tokens=add_special_tokens).ids)

    def _plain_ids(self, texts: Sequence[str]) -> list[list[int]]:
        self._tokenizer.encode_special_tokens = True
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, by default without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """A conversation as the chat template writes it.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        return self._templates.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        ).text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatTokens:
        """A conversation as tokens, and which of them are targets.

        Raises:
            ValueError: as `encode_conversation`.
        """
        return encode_conversation(self._tokenizer, self._templates, messages, tools)


def whole_text(text: str) -> str:
    """The text with U+FFFD for halves of characters, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def named_ids(files: Mapping[str, bytes], model: Path) -> NamedIds:
    """The end tokens that generation_config.json and the model's config.json name.

    Args:
        files: of the tokenizer.
        model: a config.json, or a folder that may hold one.
    """
    config = model / CONFIG if model.is_dir() else model
    values = read_json({CONFIG: config.read_bytes()}, CONFIG) if config.is_file() else {}
    generation = read_json(files, GENERATION_CONFIG)
    return NamedIds(
        config=token_ids_of(values, "eos_token_id", CONFIG),
        generation=token_ids_of(generation, "eos_token_id", GENERATION_CONFIG),
    )


def parse_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of the files, with the tokens that tokenizer_config.json adds to it.

    Raises:
        ValueError: tokenizer.json cannot be read as a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
    # tokenizers raises a bare Exception for a file that it cannot read.
    except Exception as error:
        raise TrainValueError(f"{TOKENIZER} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    listed = read_json(files, TOKENIZER_CONFIG).get("added_tokens_decoder", {})
    added = [AddedToken(**token) for _, token in sorted(listed.items(), key=lambda i: int(i[0]))]
    tokenizer.add_tokens([t for t in added if tokenizer.token_to_id(t.content) is None])
    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [text for text in named_tokens(files).values() if text not in marked]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in named])
    return tokenizer


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens that have a role, such as `eos_token`, as templates see them."""
    values = read_json(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in values:
        values = {**values, **read_json(files, SPECIAL_TOKENS_MAP)}
    found = {}
    for role, token in values.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _begin_ids(tokenizer: Tokenizer, ends: EndTokens) -> list[int]:
    """What the tokenizer puts before a text; not an end token, which the document before has."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    count = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0)
    return [each for each in whole[:count] if each not in ends.eos_token_ids]
