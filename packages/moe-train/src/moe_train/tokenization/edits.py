"""A tokenizer's files with what the keys of `[tokenizer]` change, and all of them in agreement.

Invariant: a file in which nothing changes keeps its bytes.

    tokenizer = edited(files, config, ids)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from moe_train.config import Config
from moe_train.errors import MissingFileError
from moe_train.tokenization.end_tokens import EndTokens, NamedIds, end_tokens, token_ids_of
from moe_train.tokenization.folder import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    SLOW_FILES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_json,
    to_json,
)
from moe_train.tokenization.text_tokenizer import TextTokenizer, named_tokens, parse_tokenizer


def edited(files: Mapping[str, bytes], config: Config, ids: NamedIds) -> TextTokenizer:
    """The tokenizer of these files, with the keys of `[tokenizer]` applied.

    Args:
        ids: the end tokens that the model's files name.

    Raises:
        FileNotFoundError: the chat template does not exist.
        ValueError: the tokenizer cannot be read, or end tokens contradict each other.
    """
    table = config.tokenizer
    tokenizer = parse_tokenizer(files)
    before = repr(tokenizer.get_added_tokens_decoder())
    _add_tokens(tokenizer, config)
    if repr(tokenizer.get_added_tokens_decoder()) != before:
        files = _with_tokens(files, tokenizer)
    template = given_template(config)
    if template is not None:
        files = _with_template(files, template)
    ends = end_tokens(
        tokenizer,
        named_tokens(files),
        ids,
        pretrained=keeps_vocabulary(config),
        decided=table.eos_token,
    )
    return agreed(files, tokenizer, ends)


def keeps_vocabulary(config: Config) -> bool:
    """Whether the model was trained with the special tokens that its files name."""
    return config.model.init_from is not None and not config.tokenizer.train


def agreed(files: Mapping[str, bytes], parsed: Tokenizer, ends: EndTokens) -> TextTokenizer:
    """The tokenizer of these files, all of which name the end tokens `ends`.

    Args:
        parsed: what `parse_tokenizer` makes of the files.
    """
    end = parsed.id_to_token(ends.document_end_id)
    changed = _with_end(files, end, ends)
    if changed != files:
        parsed = parse_tokenizer(changed)
    return TextTokenizer(_with_generation(changed, ends), ends, parsed)


def _add_tokens(tokenizer: Tokenizer, config: Config) -> None:
    """Add the new tokens; the end token becomes a special one if it is not."""
    special = list(config.tokenizer.new_special_tokens)
    end = config.tokenizer.eos_token
    if end is not None and tokenizer.token_to_id(end) is not None:
        special.append(end)
    marked = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special if text not in marked]
    )
    fresh = [text for text in config.tokenizer.new_tokens if tokenizer.token_to_id(text) is None]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in fresh])


def _with_tokens(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer that got more tokens; those of the slow one are left behind."""
    kept = {name: content for name, content in files.items() if name not in SLOW_FILES}
    kept[TOKENIZER] = tokenizer.to_str(pretty=True).encode()
    values = read_json(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" in values:
        values["added_tokens_decoder"] = {
            str(token_id): _token_fields(token)
            for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
        }
        kept[TOKENIZER_CONFIG] = to_json(values)
    return kept


def _token_fields(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def given_template(config: Config) -> bytes | None:
    """The content of `tokenizer.chat_template`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if config.tokenizer.chat_template is None:
        return None
    path = Path(config.tokenizer.chat_template)
    if not path.is_file():
        raise MissingFileError(f"tokenizer.chat_template={path} does not exist; name a jinja file")
    return path.read_bytes()


def _with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    values = read_json(files, TOKENIZER_CONFIG)
    kept = {**files, CHAT_TEMPLATE: template}
    if values.pop("chat_template", None) is not None:
        kept[TOKENIZER_CONFIG] = to_json(values)
    return kept


def _with_end(files: Mapping[str, bytes], end: str | None, ends: EndTokens) -> dict[str, bytes]:
    """The files, with `end` as the tokenizer's end token."""
    if named_tokens(files).get("eos_token") == end:
        return dict(files)
    values = read_json(files, TOKENIZER_CONFIG)
    if not values:
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **({"pad_token": end} if ends.pad_token_id == ends.document_end_id else {}),
        }
    changed = {**files, TOKENIZER_CONFIG: to_json({**values, "eos_token": end})}
    if SPECIAL_TOKENS_MAP in files:
        roles = read_json(files, SPECIAL_TOKENS_MAP)
        changed[SPECIAL_TOKENS_MAP] = to_json({**roles, "eos_token": end})
    return changed


def _with_generation(files: Mapping[str, bytes], ends: EndTokens) -> dict[str, bytes]:
    """The files, with every end token in generation_config.json."""
    values = read_json(files, GENERATION_CONFIG)
    if set(token_ids_of(values, "eos_token_id", GENERATION_CONFIG)) == set(ends.eos_token_ids):
        return dict(files)
    ids = list(ends.eos_token_ids)
    values["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    values["pad_token_id"] = ends.pad_token_id
    return {**files, GENERATION_CONFIG: to_json(values)}
