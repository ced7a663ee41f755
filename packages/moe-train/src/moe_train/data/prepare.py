"""Turn a corpus into token files once, and find them in the cache from then on.

Invariant: the fingerprint is a function of the documents' names and contents and of the settings
that shape the token files; equal fingerprints mean equal token files, on every machine.

A warm call costs a walk over the files' names, sizes and times of change. When those are new, the
contents are hashed; only new contents are encoded.

    prepared = prepare(config)
    split = PackedSplit(prepared.train_tokens, 256, prepared.eos_token_id, True)
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_train.cache import default_cache_dir, locked, publish, write_atomic
from moe_train.config import Config
from moe_train.data.corpus import Document, find_documents, name_hash, read_text
from moe_train.data.token_store import open_store, write_store
from moe_train.errors import TrainValueError, check_type
from moe_train.tokenization import (
    TextTokenizer,
    choose_tokenizer,
    load_tokenizer,
    train_settings,
    train_tokenizer,
)

_VERSION = "1"
_ENCODE_BATCH_BYTES = 4_000_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSource:
    """One source, as token files.

    Attributes:
        name: that of its table; "data" when there are no tables of sources.
        kind: what it holds, as data.kind.
        weight: its share of the samples, relative to the other sources.
        packing: how its documents fill sequences, as data.packing.
        train: token file of the training documents (`open_store`).
        validation: token file of the held-out documents.
        fingerprint: hex digits that stand for the two files' content.
    """

    name: str
    kind: str
    weight: float
    packing: str
    train: Path
    validation: Path
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCorpus:
    """A corpus ready to train on.

    Attributes:
        sources: at least one, in the order of the file.
        tokenizer_file: the tokenizer.json that made the tokens, among its other files.
        vocab_size: number of token ids, special ones included.
        eos_token_id: the token that ends each document of text.
        pad_token_id: the token of padding.
        fingerprint: hex digits that stand for the content of all token files.
    """

    sources: tuple[PreparedSource, ...]
    tokenizer_file: Path
    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    fingerprint: str

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens; read anew each time."""
        return load_tokenizer(self.tokenizer_file.parent)

    def __post_init__(self) -> None:
        check_type("tokenizer_file", self.tokenizer_file, Path)
        check_type("sources", self.sources, tuple)

    @property
    def train_tokens(self) -> Path:
        """The token file of the first source's training documents."""
        return self.sources[0].train

    @property
    def validation_tokens(self) -> Path:
        """The token file of the first source's held-out documents."""
        return self.sources[0].validation


def prepare(config: Config) -> PreparedCorpus:
    """Find, tokenize and split the corpus of `config`, or find the result in the cache.

    Not collective; any number of processes may call it at once, one of them does the work.

    Raises:
        FileNotFoundError: a corpus entry or the tokenizer file does not exist.
        ValueError: no text was found, there are too few documents for a held-out split, or the
            tokenizer cannot be used.
    """
    check_type("config", config, Config)
    cache_dir = Path(config.data.cache_dir or default_cache_dir())
    documents = find_documents(
        config.data.corpus, extensions=config.data.extensions, max_bytes=config.data.max_bytes
    )
    chosen = choose_tokenizer(config)
    settings = _settings(config, chosen)
    seen_as = _digest(
        [settings] + [f"{d.path}|{d.name}|{d.size_bytes}|{d.mtime_ns}" for d in documents]
    )
    index_file = cache_dir / "index" / f"{seen_as}.json"
    prepared = _lookup(cache_dir, index_file)
    if prepared is None:
        with locked(cache_dir / "locks" / f"{seen_as}.lock"):
            prepared = _lookup(cache_dir, index_file)
            if prepared is None:
                prepared = _build(config, chosen, cache_dir, settings, documents)
                write_atomic(index_file, json.dumps({"fingerprint": prepared.fingerprint}))
    return prepared


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Divide whole documents into training and held-out ones.

    In the order of their names' hashes, documents that still fit are held out until the fraction
    is reached; so a new document seldom moves another one. Both parts keep the given order.

    Raises:
        ValueError: fewer than two documents.
    """
    if len(documents) < 2:
        raise TrainValueError(
            f"the corpus has {len(documents)} usable document(s), but a held-out split takes whole "
            "documents and needs at least 2; cut the text into several files or add more"
        )
    room = validation_fraction * sum(document.size_bytes for document in documents)
    held: set[Path] = set()
    for document in sorted(documents, key=lambda item: (name_hash(item.name), item.name)):
        if document.size_bytes <= room and len(held) < len(documents) - 1:
            room -= document.size_bytes
            held.add(document.path)
    if not held:
        held = {min(documents, key=lambda item: (item.size_bytes, item.name)).path}
    train = [document for document in documents if document.path not in held]
    return train, [document for document in documents if document.path in held]


def _settings(config: Config, chosen: TextTokenizer | None) -> str:
    """What shapes the token files beside the documents, as text."""
    tokenizer = train_settings(config) if chosen is None else chosen.fingerprint
    return f"{_VERSION}|{tokenizer}|{config.data.validation_fraction!r}"


def _digest(parts: Iterable[str]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _lookup(cache_dir: Path, index_file: Path) -> PreparedCorpus | None:
    """What the cache holds for these files, or None when it is missing or damaged."""
    try:
        fingerprint = json.loads(index_file.read_bytes())["fingerprint"]
    except (OSError, ValueError, KeyError):
        return None
    return _open(cache_dir / "corpora" / str(fingerprint))


def _open(folder: Path) -> PreparedCorpus | None:
    """The corpus in a folder, whose name is its fingerprint; None when it is damaged."""
    try:
        facts = json.loads((folder / "corpus.json").read_bytes())
        source = PreparedSource(
            name="data",
            kind="text",
            weight=1.0,
            packing="stream",
            train=folder / "train.bin",
            validation=folder / "validation.bin",
            fingerprint=folder.name,
        )
        prepared = PreparedCorpus(
            sources=(source,),
            tokenizer_file=folder / "tokenizer.json",
            vocab_size=facts["vocab_size"],
            eos_token_id=facts["eos_token_id"],
            pad_token_id=facts.get("pad_token_id", facts["eos_token_id"]),
            fingerprint=folder.name,
        )
        open_store(prepared.train_tokens)
        open_store(prepared.validation_tokens)
    except (OSError, ValueError, KeyError):
        return None
    return prepared if prepared.tokenizer_file.is_file() else None


def _build(
    config: Config,
    chosen: TextTokenizer | None,
    cache_dir: Path,
    settings: str,
    documents: Sequence[Document],
) -> PreparedCorpus:
    started = time.perf_counter()
    usable, digests = _usable(documents)
    train, validation = split_documents(usable, config.data.validation_fraction)
    folder = cache_dir / "corpora" / _digest([settings, *digests])
    prepared = _open(folder)
    if prepared is not None:
        return prepared
    size_mb = sum(document.size_bytes for document in usable) / 1e6
    logger.info("preparing %d documents of text, %.1f MB (once)", len(usable), size_mb)
    publish(folder, lambda work: _fill(work, config, chosen, train, validation))
    prepared = _open(folder)
    if prepared is None:
        raise TrainValueError(f"{folder} was changed while it was made; delete it and start again")
    logger.info("prepared the corpus in %.1f s: %s", time.perf_counter() - started, folder)
    return prepared


def _usable(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """The documents that are text, and for each its name and a digest of its content."""
    usable, digests = [], []
    for document in documents:
        text = read_text(document.path)
        if text is not None:
            usable.append(document)
            digests += [document.name, _digest([text])]
    if len(usable) < len(documents):
        skipped = len(documents) - len(usable)
        logger.info("left out %d files that are not UTF-8 text", skipped)
    return usable, digests


def _fill(
    work: Path,
    config: Config,
    chosen: TextTokenizer | None,
    train: Sequence[Document],
    validation: Sequence[Document],
) -> None:
    """Write tokenizer, token files and facts into the folder `work`."""
    tokenizer = chosen
    if tokenizer is None:
        started = time.perf_counter()
        sample = _sample_texts(train, config.tokenizer.train_bytes)
        tokenizer = train_tokenizer(sample, config)
        logger.info("trained the tokenizer in %.1f s", time.perf_counter() - started)
    for name, content in tokenizer.files.items():
        (work / name).write_bytes(content)
    vocab_size, eos_token_id = tokenizer.vocab_size, tokenizer.document_end_id
    started = time.perf_counter()
    for name, documents in (("train.bin", train), ("validation.bin", validation)):
        parts = _encoded(tokenizer, documents)
        write_store(work / name, parts, vocab_size=vocab_size)
    logger.info("encoded the documents in %.1f s", time.perf_counter() - started)
    facts = {
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (work / "corpus.json").write_text(json.dumps(facts) + "\n")


def _sample_texts(documents: Sequence[Document], max_bytes: int) -> Iterator[str]:
    """Texts in the order of their names' hashes, about `max_bytes` of them, the last one cut."""
    room = max_bytes
    for document in sorted(documents, key=lambda item: (name_hash(item.name), item.name)):
        if room <= 0:
            return
        yield (read_text(document.path) or "")[:room]
        room -= document.size_bytes


def _encoded(
    tokenizer: TextTokenizer, documents: Sequence[Document]
) -> Iterator[NDArray[np.int64]]:
    """Token ids of each document, the end-of-text token behind them."""
    for batch in _batches(documents):
        for ids in tokenizer.encode_batch([read_text(document.path) or "" for document in batch]):
            yield np.append(ids, tokenizer.document_end_id)


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Runs of documents of a few megabytes, so that memory does not grow with the corpus."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size_bytes
        if size >= _ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
