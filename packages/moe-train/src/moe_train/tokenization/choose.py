"""Which tokenizer a job uses: the given one, that of the model it starts from, or a new one.

tokenizer = choose_tokenizer(config)       # None: train one on the corpus
"""

from pathlib import Path

from moe_train.config import Config
from moe_train.errors import MissingFileError
from moe_train.tokenization.end_tokens import end_tokens
from moe_train.tokenization.folder import read_files
from moe_train.tokenization.text_tokenizer import (
    TextTokenizer,
    named_ids,
    named_tokens,
    parse_tokenizer,
)


def choose_tokenizer(config: Config) -> TextTokenizer | None:
    """`tokenizer.file`, else that of `model.init_from`, else None: a BPE is to be trained.

    Raises:
        FileNotFoundError: the tokenizer does not exist.
        ValueError: it cannot be used.
    """
    given = config.tokenizer.file or config.model.init_from
    if given is None:
        return None
    if config.tokenizer.file is not None and not Path(given).exists():
        raise MissingFileError(f"tokenizer.file={given} does not exist")
    files = read_files(Path(given))
    ends = end_tokens(
        parse_tokenizer(files),
        named_tokens(files),
        named_ids(files, Path(config.model.source)),
        pretrained=config.model.init_from is not None,
    )
    return TextTokenizer(files, ends)
