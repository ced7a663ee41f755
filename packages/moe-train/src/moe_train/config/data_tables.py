"""The tables that say what is trained on, how it is read and cut, and how it becomes tokens.

DataConfig(corpus=(PYTHON_STDLIB,), sequence_length=256)
SourceConfig(name="code", corpus=("code.jsonl",), weight=2.0)   # the table [sources.code]
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError

_ROW_FORMATS = ("auto", "jsonl", "parquet")
_FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("auto", "text", "jsonl", "parquet"),
    "chat": _ROW_FORMATS,
    "tokens": (*_ROW_FORMATS, "megatron", "bin", "npy", "safetensors"),
    "preference": _ROW_FORMATS,
    "embedding": _ROW_FORMATS,
}

PYTHON_STDLIB = "python_stdlib"
"""Name of the built-in corpus: the standard library source of the running interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Table):
    """What is trained on, how it is read, and how it is cut into sequences."""

    table: ClassVar[str] = "data"
    corpus: tuple[str, ...] = key(
        f'what to train on: "{PYTHON_STDLIB}" (source of the running interpreter\'s standard '
        "library), folders, files or globs; not used with [sources.NAME]",
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
    kind: Literal["text", "chat", "tokens", "preference", "embedding"] = key(
        "what the corpus holds: running text, conversations, token ids, preference pairs or "
        'embedding pairs (both pairs are checked by "moe-train data", not trained on)',
        default="text",
        on_resume="compared",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "megatron", "bin", "npy", "safetensors"] = (
        key(
            "how its files are written; auto goes by the ending (before .gz, .bz2, .xz or .zst)",
            default="auto",
            on_resume="compared",
        )
    )
    field: str | None = key(
        'field of JSONL and Parquet rows that is read, "a.b" for field b of field a; absent: '
        '"text", for chat "messages", for tokens "input_ids"',
        default=None,
        on_resume="compared",
    )
    packing: Literal["stream", "best_fit", "pad"] | None = key(
        "how documents fill sequences: one after another and cut, whole with the least room left "
        'over, or one in each; absent: "stream", for chat "best_fit"',
        default=None,
        on_resume="asked",
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = key(
        "number format of raw .bin files of token ids; absent: that which the vocabulary needs",
        default=None,
        on_resume="compared",
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
    num_workers: int | None = key(
        "processes that read and tokenize the corpus; absent: the cores of the machine",
        unit="processes",
        default=None,
        minimum=1,
        on_resume="free",
    )
    prefetch_batches: int = key(
        "batches made in the background ahead of the step; 0 for none",
        unit="batches",
        default=2,
        minimum=0,
        on_resume="free",
    )

    def _check(self) -> None:
        if not self.corpus or not all(self.corpus):
            raise TrainValueError(
                f'data.corpus={list(self.corpus)} names no text; use ["{PYTHON_STDLIB}"]'
            )
        _check_format(self.place, self.kind, self.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig(Table):
    """One source of a mixture; keys that are absent are those of [data]."""

    table: ClassVar[str] = "sources.NAME"
    name: str
    corpus: tuple[str, ...] = key(
        "folders, files or globs of this source, as data.corpus", unit=PATH, on_resume="compared"
    )
    weight: float = key(
        "share of the samples, relative to the weights of the other sources",
        default=1.0,
        above=0,
        on_resume="asked",
    )
    kind: Literal["text", "chat", "tokens", "preference", "embedding"] | None = key(
        "as data.kind", default=None, on_resume="compared"
    )
    format: (
        Literal["auto", "text", "jsonl", "parquet", "megatron", "bin", "npy", "safetensors"] | None
    ) = key("as data.format", default=None, on_resume="compared")
    field: str | None = key("as data.field", default=None, on_resume="compared")
    extensions: tuple[str, ...] | None = key(
        "as data.extensions", default=None, on_resume="compared"
    )
    packing: Literal["stream", "best_fit", "pad"] | None = key(
        "as data.packing", default=None, on_resume="asked"
    )
    max_bytes: int | None = key(
        "as data.max_bytes", unit="bytes", default=None, minimum=1, on_resume="compared"
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = key(
        "as data.dtype", default=None, on_resume="compared"
    )

    @property
    def place(self) -> str:
        """The table's name in the file."""
        return f"sources.{self.name}"

    def _check(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise TrainValueError(
                f"[sources.{self.name}] is no name of a source; use letters, digits, _ and -"
            )
        if not self.corpus or not all(self.corpus):
            raise TrainValueError(
                f"{self.place}.corpus={list(self.corpus)} names no file; name folders or files"
            )

    def filled(self, data: DataConfig) -> "SourceConfig":
        """This source with every key set: absent keys from [data], then from what it holds."""
        given: dict[str, Any] = {
            item.name: getattr(self, item.name)
            if getattr(self, item.name) is not None
            else getattr(data, item.name, None)
            for item in dataclasses.fields(self)
        }
        kind = given["kind"]
        _check_format(self.place, kind, given["format"])
        fields = {"chat": "messages", "tokens": "input_ids"}
        given["field"] = given["field"] or fields.get(kind, "text")
        given["packing"] = given["packing"] or ("best_fit" if kind == "chat" else "stream")
        if given["packing"] == "best_fit" and not data.reset_at_documents:
            raise TrainValueError(
                f'{self.place}.packing="best_fit" puts documents that have nothing to do with each '
                "other into one sequence, so they must not attend to each other; set "
                'data.reset_at_documents=true, or packing to "pad"'
            )
        return SourceConfig(**given)


def _check_format(place: str, kind: str, file_format: str) -> None:
    if file_format not in _FORMATS[kind]:
        raise TrainValueError(
            f'{place}.kind="{kind}" cannot be read from {place}.format="{file_format}"; choose '
            f"among {', '.join(_FORMATS[kind])}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(Table):
    """How text becomes tokens."""

    table: ClassVar[str] = "tokenizer"
    file: str | None = key(
        "folder of a tokenizer, or path of a tokenizer.json; absent: that of model.init_from, and "
        "without init_from a BPE that is trained",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    train: bool = key(
        "train a BPE although model.init_from has embeddings; their rows lose their meaning",
        default=False,
        on_resume="compared",
    )
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
    eos_token: str | None = key(
        "the token that ends documents and generated texts; absent: the tokenizer's eos_token, "
        "held against config.json and generation_config.json",
        default=None,
        on_resume="compared",
    )
    chat_template: str | None = key(
        "path of a jinja file that takes the place of the tokenizer's chat template",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    new_tokens: tuple[str, ...] = key(
        "tokens to add: text that is one id from now on",
        default=(),
        on_resume="compared",
    )
    new_special_tokens: tuple[str, ...] = key(
        "control tokens to add, such as those of a chat template; read in templates and prompts, "
        "left out of decoded text",
        default=(),
        on_resume="compared",
    )
    pad_vocab_multiple: int | None = key(
        "let the model have a multiple of this many rows of vocabulary; absent: as many as its "
        "config.json says, or as new tokens need",
        unit="tokens",
        default=None,
        minimum=1,
        on_resume="compared",
    )

    def _check(self) -> None:
        if self.train and self.file is not None:
            raise TrainValueError(
                "tokenizer.train=true and tokenizer.file are both given; keep the one you mean"
            )
        if not all((*self.new_tokens, *self.new_special_tokens)):
            raise TrainValueError("tokenizer.new_tokens holds an empty token; leave it out")
