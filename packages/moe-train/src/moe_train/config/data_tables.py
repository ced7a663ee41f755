"""The tables that say which text is trained on, how it is cut, and how it becomes tokens.

DataConfig(corpus=(PYTHON_STDLIB,), sequence_length=256)
"""

from dataclasses import dataclass
from typing import ClassVar

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError

PYTHON_STDLIB = "python_stdlib"
"""Name of the built-in corpus: the standard library source of the running interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Table):
    """Which text is trained on, and how it is cut into sequences."""

    table: ClassVar[str] = "data"
    corpus: tuple[str, ...] = key(
        f'text to train on: "{PYTHON_STDLIB}" (source of the running interpreter\'s standard '
        "library), folders, files or globs",
        default=(PYTHON_STDLIB,),
        unit=PATH,
        on_resume="compared",
    )
    extensions: tuple[str, ...] = key(
        'endings of the files taken from folders; "*" takes every text file',
        default=(".py",),
        on_resume="compared",
    )
    sequence_length: int = key(
        "length of a sequence", unit="tokens", default=256, minimum=1, on_resume="asked"
    )
    validation_fraction: float = key(
        "share of the text, in whole documents, held out for validation",
        unit="fraction of bytes",
        default=0.02,
        above=0,
        maximum=0.5,
        on_resume="compared",
    )
    reset_at_documents: bool = key(
        "restart positions and attention at each document; false attends across documents",
        default=True,
        on_resume="asked",
    )
    max_bytes: int | None = key(
        "use about this much of the corpus, in whole documents; absent: all of it",
        unit="bytes",
        default=None,
        minimum=1,
        on_resume="compared",
    )
    cache_dir: str | None = key(
        "folder for tokenizers and token files; absent: moe-train in the user's cache folder",
        default=None,
        unit=PATH,
        on_resume="free",
    )

    def _check(self) -> None:
        if not self.corpus or not all(self.corpus):
            raise TrainValueError(
                f'data.corpus={list(self.corpus)} names no text; use ["{PYTHON_STDLIB}"]'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(Table):
    """How text becomes tokens."""

    table: ClassVar[str] = "tokenizer"
    vocab_size: int = key(
        "entries of the byte-level BPE vocabulary to train; not used with file",
        unit="tokens",
        default=4096,
        minimum=257,
        on_resume="compared",
    )
    train_bytes: int = key(
        "size of the sample of the corpus that the BPE is trained on",
        unit="bytes",
        default=8_000_000,
        minimum=1,
        on_resume="compared",
    )
    file: str | None = key(
        "path of a tokenizer.json to use instead of training one",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
