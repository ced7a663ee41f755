"""What a job's tokenizer changes in its model's files, and what a person should know of it.

model_ids(config, tokenizer, config_json)      # {} where they agree
for line in describe_choice(config, tokenizer):
    print(line)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.tokenization.choose import vocabulary_rows
from moe_train.tokenization.edits import keeps_vocabulary
from moe_train.tokenization.end_tokens import describe, token_ids_of
from moe_train.tokenization.folder import TOKENIZER, read_files, read_json
from moe_train.tokenization.text_tokenizer import (
    CONFIG,
    TextTokenizer,
    named_tokens,
    parse_tokenizer,
)


def model_ids(
    config: Config, tokenizer: TextTokenizer, values: Mapping[str, Any]
) -> dict[str, int | tuple[int, ...] | None]:
    """The special tokens that a model's config.json has to name otherwise to agree.

    Begin and padding tokens only of a model that was not trained with them: one that is no special
    token of the tokenizer becomes that of the tokenizer.

    Args:
        values: of the config.json.
    """
    ends = set(token_ids_of(values, "eos_token_id", CONFIG))
    changes: dict[str, int | tuple[int, ...] | None] = {}
    if not ends or not ends <= set(tokenizer.eos_token_ids):
        changes["eos_token_id"] = tokenizer.eos_token_ids
    if not keeps_vocabulary(config):
        parsed, named = parse_tokenizer(tokenizer.files), named_tokens(tokenizer.files)
        special = {i for i, token in parsed.get_added_tokens_decoder().items() if token.special}
        for role in ("bos", "pad"):
            given = values.get(f"{role}_token_id")
            if given is not None and given not in special:
                token = named.get(f"{role}_token")
                changes[f"{role}_token_id"] = None if token is None else parsed.token_to_id(token)
    return changes


def describe_choice(config: Config, tokenizer: TextTokenizer) -> list[str]:
    """What a person should know of the job's tokenizer, one line each; mostly nothing."""
    lines = []
    source = Path(config.model.source)
    file = source / CONFIG if source.is_dir() else source
    values = read_json({CONFIG: file.read_bytes()}, CONFIG)
    values = {**values, **values.get("text_config", {})}  # of a model of text and images
    chosen = parse_tokenizer(tokenizer.files)
    if config.model.init_from is not None and config.tokenizer.train:
        lines.append(
            f"tokenizer.train: a new BPE is used with the embeddings of {source}, whose rows lose "
            "their meaning"
        )
    elif config.model.init_from is not None and config.tokenizer.file is not None:
        count = _num_different(chosen, source)
        if count:
            lines.append(
                f"tokenizer.file={config.tokenizer.file} differs from the tokenizer of {source} in "
                f"{count} ids, whose embeddings lose their meaning"
            )
    changes = model_ids(config, tokenizer, values)
    changed = [name for name in changes if values.get(name) is not None]
    if changed:
        was = ", ".join(f"{name}={values[name]}" for name in changed)
        lines.append(
            f"special tokens: config.json names {was}, the tokenizer others; texts end with "
            f"{describe(chosen, tokenizer.eos_token_ids)}, and checkpoints say so in config.json "
            "and generation_config.json"
        )
    if any(each.kind == "chat" for each in config.all_sources):
        lines += _describe_turns(tokenizer)
    return [*lines, *_describe_rows(config, values["vocab_size"], tokenizer)]


def _describe_turns(tokenizer: TextTokenizer) -> list[str]:
    """Whether generation stops where the chat template ends the assistant's turn."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        found = tokenizer.encode_chat(talk)
    except TrainValueError:
        return []  # it refuses this conversation; preparing the data says more
    trained = found.ids[found.trained].tolist()
    if not trained or trained[-1] in tokenizer.eos_token_ids:
        return []
    end = tokenizer.decode(trained[-1:], skip_special_tokens=False)
    return [
        f"chat template: turns end with {end!r}, which is no end token, so that generation goes on "
        f"behind it; if it is a token of its own, set tokenizer.eos_token={json.dumps(end)}"
    ]


def _describe_rows(config: Config, vocab_size: int, tokenizer: TextTokenizer) -> list[str]:
    rows = vocabulary_rows(config, vocab_size)
    if rows == vocab_size:
        return []
    begins = "the mean of the others" if config.model.init_from is not None else "random weights"
    return [
        f"vocabulary: {rows} rows instead of {vocab_size} for {tokenizer.vocab_size} tokens; "
        f"new rows of the embedding and the head begin as {begins}"
    ]


def _num_different(chosen: Tokenizer, source: Path) -> int:
    """Ids that are not the same token in the tokenizer of the folder `source`."""
    if not (source / TOKENIZER).is_file():
        return 0
    tables = [
        {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        for tokenizer in (chosen, parse_tokenizer(read_files(source)))
    ]
    return sum(tables[0].get(each) != tables[1].get(each) for each in {*tables[0], *tables[1]})
