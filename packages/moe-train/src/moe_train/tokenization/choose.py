"""Which tokenizer a job uses: the given one, that of the model it starts from, or a new one.

Invariant: it is a function of the configuration and of the files that it names, so that every rank
chooses alike; what was decided on the way is said once, by `describe_choice`.

    tokenizer = choose_tokenizer(config)       # None: train one on the corpus
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from moe_train.config import Config
from moe_train.errors import MissingFileError, TrainValueError
from moe_train.tokenization.bpe import train_bpe
from moe_train.tokenization.edits import agreed, edited, given_template
from moe_train.tokenization.end_tokens import NamedIds, end_tokens
from moe_train.tokenization.folder import GENERATION_CONFIG, read_files
from moe_train.tokenization.text_tokenizer import (
    TextTokenizer,
    named_ids,
    named_tokens,
    parse_tokenizer,
)


def choose_tokenizer(config: Config) -> TextTokenizer | None:
    """`tokenizer.file`, else that of `model.init_from`, else None: a BPE is to be trained.

    The keys of `[tokenizer]` are applied: new tokens, end token, chat template.

    Raises:
        FileNotFoundError: the tokenizer does not exist.
        ValueError: it cannot be used, or its end tokens contradict those of the model.
    """
    table, init_from = config.tokenizer, config.model.init_from
    if table.file is not None:
        if not Path(table.file).exists():
            raise MissingFileError(f"tokenizer.file={table.file} does not exist")
        files = read_files(Path(table.file))
        generation = Path(init_from or "") / GENERATION_CONFIG
        if init_from is not None and generation.is_file():
            files.setdefault(GENERATION_CONFIG, generation.read_bytes())
    elif init_from is not None and not table.train:
        files = _of_source(Path(init_from))
    else:
        return None
    ids = named_ids(files, Path(config.model.source))
    return edited(files, config, ids)


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in a folder, or of a tokenizer.json, as it is.

    Every end token that the folder's files name ends a text, whether they agree or not.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read.
    """
    files = read_files(path)
    tokenizer, named = parse_tokenizer(files), named_tokens(files)
    ids = named_ids(files, path if path.is_dir() else path.parent / "none").all
    own = tokenizer.token_to_id(named.get("eos_token", ""))
    ids = ids if own is None else (own, *ids)
    tokens = NamedIds(config=tuple(each for each in ids if tokenizer.id_to_token(each) is not None))
    return agreed(files, tokenizer, end_tokens(tokenizer, named, tokens, pretrained=True))


def train_settings(config: Config) -> str:
    """What the tokenizer of `train_tokenizer` depends on, beside the texts."""
    table = config.tokenizer
    changes = [table.eos_token, *table.new_tokens, "", *table.new_special_tokens]
    template = given_template(config)
    if template is not None:
        changes.append(hashlib.blake2b(template, digest_size=16).hexdigest())
    settings = f"bpe {table.vocab_size} {table.train_bytes}"
    return f"{settings} {changes!r}" if any(changes) else settings


def train_tokenizer(texts: Iterable[str], config: Config) -> TextTokenizer:
    """The BPE that a job trains on texts of its corpus, with the keys of `[tokenizer]` applied."""
    files = train_bpe(texts, vocab_size=config.tokenizer.vocab_size)
    return edited(files, config, NamedIds())


def vocabulary_rows(config: Config, vocab_size: int) -> int:
    """How many rows of vocabulary the job's model has; at least the `vocab_size` of config.json.

    Only `tokenizer.new_tokens`, `new_special_tokens` and `pad_vocab_multiple` ask for more.
    """
    table = config.tokenizer
    rows = vocab_size
    if table.new_tokens or table.new_special_tokens or table.pad_vocab_multiple:
        tokenizer = choose_tokenizer(config)
        rows = rows if tokenizer is None else max(rows, tokenizer.vocab_size)
    multiple = table.pad_vocab_multiple or 1
    return -(-rows // multiple) * multiple


def _of_source(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in the folder of `model.init_from`."""
    try:
        return read_files(folder)
    except MissingFileError as error:
        raise TrainValueError(
            f"model.init_from={folder} has no tokenizer to go on with: {error}; or set "
            "tokenizer.train=true for a new BPE, with which its embedding rows lose their meaning"
        ) from error
