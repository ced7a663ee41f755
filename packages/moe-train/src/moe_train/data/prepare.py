"""Turn a corpus into token files once, and find them in the cache from then on.

Invariant: the fingerprint is a function of the files' names and contents and of the settings that
shape the token files; equal fingerprints mean equal token files, on every machine.

A warm call costs a walk over the files' names, sizes and times of change. When those are new, the
contents are hashed; only new contents are encoded. Each source is kept by itself, so that a new
source leaves the others as they are.

    prepared = prepare(config, verify=True)
    open_store(prepared.sources[0].train).num_documents
"""

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from moe_train.cache import default_cache_dir, locked, publish, write_atomic
from moe_train.config import Config, SourceConfig
from moe_train.data.pool import make_pieces, usable_cores
from moe_train.data.token_store import StoreWriter, damage_of, new_store, open_store
from moe_train.data.tokenizer_files import file_digest, kept_tokenizer, write_files
from moe_train.errors import TrainValueError, check_type
from moe_train.reading import (
    Document,
    SourcePlan,
    digest_of,
    find_files,
    plan_source,
    take_piece,
    training_texts,
)
from moe_train.tokenization import (
    TextTokenizer,
    choose_tokenizer,
    load_tokenizer,
    train_settings,
    train_tokenizer,
)

_VERSION = "1"
_FACTS = "corpus.json"
_NOT_TRAINED_ON = ("preference", "embedding")

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
        left_out: how many files or rows were left out, by reason.
    """

    name: str
    kind: str
    weight: float
    packing: str
    train: Path
    validation: Path
    fingerprint: str
    left_out: Mapping[str, int] = field(default_factory=dict)


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

    @property
    def paths(self) -> list[Path]:
        """Files that reading it needs, named by what they hold."""
        stores = [path for source in self.sources for path in (source.train, source.validation)]
        return [self.tokenizer_file, *stores]

    def __post_init__(self) -> None:
        check_type("tokenizer_file", self.tokenizer_file, Path)
        check_type("sources", self.sources, tuple)


def prepare(config: Config, *, verify: bool = False, only_check: bool = False) -> PreparedCorpus:
    """Find, tokenize and split the corpus of `config`, or find the result in the cache.

    Not collective; any number of processes may call it at once, one of them does the work.

    Args:
        verify: read token files that the cache has and make those anew that are damaged.
        only_check: accept pairs too, which are read and checked but not trained on.

    Raises:
        FileNotFoundError: a corpus entry or the tokenizer file does not exist.
        ValueError: a file or row cannot be used, there is too little to hold a part of it out, or
            the tokenizer cannot be used.
    """
    check_type("config", config, Config)
    sources = config.all_sources
    for source in sources:
        if source.kind in _NOT_TRAINED_ON and not only_check:
            raise TrainValueError(
                f'source {source.name} has kind="{source.kind}", which `moe-train data` reads and '
                "checks, but there is no training on pairs yet; choose text, chat or tokens"
            )
    cache_dir = Path(config.data.cache_dir or default_cache_dir())
    found = [find_files(source) for source in sources]
    chosen = choose_tokenizer(config)
    settings = _settings(config, chosen)
    seen = [settings]
    for source, documents in zip(sources, found, strict=True):
        seen.append(
            repr((source.kind, source.format, source.field, source.dtype, source.max_bytes))
        )
        seen += [f"{d.path}|{d.name}|{d.size_bytes}|{d.mtime_ns}" for d in documents]
        if source.kind == "tokens":  # documents of Megatron's files lie in an index beside them
            indexes = [i for d in documents if (i := d.path.with_suffix(".idx")).is_file()]
            seen += [f"{i}|{i.stat().st_size}|{i.stat().st_mtime_ns}" for i in indexes]
    seen_as = digest_of(seen)
    index_file = cache_dir / "index" / f"{seen_as}.json"
    prepared = _lookup(config, cache_dir, index_file, verify)
    if prepared is None:
        with locked(cache_dir / "locks" / f"{seen_as}.lock") as is_alone:
            prepared = _lookup(config, cache_dir, index_file, verify)
            if prepared is None:
                own = seen_as if is_alone else uuid4().hex
                unpacked = cache_dir / "unpacked" / own  # other jobs remove theirs at any time
                try:
                    preparation = _Preparation(config, cache_dir, settings, chosen, unpacked)
                    prepared = preparation.run(found)
                finally:
                    shutil.rmtree(unpacked, ignore_errors=True)
                folders = [source.fingerprint for source in prepared.sources]
                write_atomic(index_file, json.dumps({"sources": folders}))
    if chosen is None:
        return prepared
    kept = kept_tokenizer(chosen, cache_dir, made=prepared.tokenizer_file.parent)
    return replace(prepared, tokenizer_file=kept)


def _settings(config: Config, chosen: TextTokenizer | None) -> str:
    """What shapes the token files beside the documents, as text."""
    tokenizer = train_settings(config) if chosen is None else chosen.fingerprint
    return f"{_VERSION}|{tokenizer}|{config.data.validation_fraction!r}"


def _lookup(
    config: Config, cache_dir: Path, index_file: Path, verify: bool
) -> PreparedCorpus | None:
    """What the cache holds for these files, or None when something is missing or damaged."""
    try:
        names = [str(name) for name in json.loads(index_file.read_bytes())["sources"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folders = [cache_dir / "corpora" / name for name in names]
    if verify:
        for folder in folders:
            _discard_if_damaged(folder)
    return _open(config, folders)


def _discard_if_damaged(folder: Path) -> None:
    """Take the description of damaged token files away, so that they are made again."""
    facts = _facts_of(folder)
    if facts is None:
        return
    size_bytes = (folder / "train.bin").stat().st_size
    if size_bytes > 1 << 30:  # takes a second and more
        logger.info("checking %s, %.1f GB", folder, size_bytes / 1e9)
    damage = damage_of(folder / "train.bin") or damage_of(folder / "validation.bin")
    for name, digest in facts["files"].items():
        if not damage and file_digest(folder / name) != digest:
            damage = f"{folder / name} is damaged: it is not the file that was written"
    if damage:
        logger.warning("%s; it is made again", damage)
        (folder / _FACTS).unlink(missing_ok=True)


def _facts_of(folder: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_bytes())
        if facts.keys() < {"vocab_size", "eos_token_id", "pad_token_id", "left_out", "files"}:
            return None
        open_store(folder / "train.bin")
        open_store(folder / "validation.bin")
    except (OSError, ValueError, AttributeError):
        return None
    return facts if (folder / "tokenizer.json").is_file() else None


def _open(config: Config, folders: Sequence[Path]) -> PreparedCorpus | None:
    """The corpus in the folders of its sources; None when one is missing or damaged."""
    found = [facts for facts in map(_facts_of, folders) if facts is not None]
    if len(found) != len(folders) or len(found) != len(config.all_sources):
        return None
    sources = tuple(
        PreparedSource(
            name=source.name,
            kind=str(source.kind),
            weight=source.weight,
            packing=str(source.packing),
            train=folder / "train.bin",
            validation=folder / "validation.bin",
            fingerprint=folder.name,
            left_out=facts["left_out"],
        )
        for source, folder, facts in zip(config.all_sources, folders, found, strict=True)
    )
    prints = [source.fingerprint for source in sources]
    return PreparedCorpus(
        sources=sources,
        tokenizer_file=folders[0] / "tokenizer.json",
        vocab_size=found[0]["vocab_size"],
        eos_token_id=found[0]["eos_token_id"],
        pad_token_id=found[0]["pad_token_id"],
        fingerprint=prints[0] if len(prints) == 1 else digest_of(prints),
    )


class _Preparation:
    """The work of `prepare` when the cache does not have its result."""

    def __init__(
        self,
        config: Config,
        cache_dir: Path,
        settings: str,
        chosen: TextTokenizer | None,
        unpacked: Path,
    ) -> None:
        self._config = config
        self._cache_dir = cache_dir
        self._settings = settings
        self._chosen = chosen
        self._unpacked = unpacked
        self._workers = config.data.num_workers or usable_cores()

    def run(self, found: Sequence[Sequence[Document]]) -> PreparedCorpus:
        """Make what is missing and open all of it."""
        started = time.perf_counter()
        sources = self._config.all_sources
        if self._chosen is None:
            _check_trainable(sources)
        plans = [
            plan_source(
                source,
                documents,
                fraction=self._config.data.validation_fraction,
                end_id=-1 if self._chosen is None else self._chosen.document_end_id,
                unpacked=self._unpacked,
            )
            for source, documents in zip(sources, found, strict=True)
        ]
        settings = [self._settings]
        if self._chosen is None and len(plans) > 1:  # the tokenizer depends on all of them
            settings += [part for plan in plans for part in plan.digests]
        folders = [
            self._cache_dir / "corpora" / digest_of([*settings, *plan.digests]) for plan in plans
        ]
        missing = [index for index, folder in enumerate(folders) if _facts_of(folder) is None]
        if missing:
            key = digest_of([*settings, *(folder.name for folder in folders)])
            tokenizer = self._chosen or self._trained(plans, key)
            for index in missing:
                self._make(sources[index], plans[index], folders[index], tokenizer)
            logger.info("prepared the corpus in %.1f s", time.perf_counter() - started)
        prepared = _open(self._config, folders)
        if prepared is None:
            raise TrainValueError(f"{self._cache_dir} was changed while it was filled; start again")
        return prepared

    def _make(
        self, source: SourceConfig, plan: SourcePlan, folder: Path, tokenizer: TextTokenizer
    ) -> None:
        """Encode a source and publish its token files."""
        size_mb = plan.size_bytes / 1e6
        with locked(self._cache_dir / "locks" / f"{folder.name}.lock") as is_alone:
            if _facts_of(folder) is not None:  # made meanwhile, from the same files elsewhere
                return
            pieces = self._cache_dir / "pieces" / (folder.name if is_alone else uuid4().hex)
            if is_alone:  # or they are of a process that is at work
                for left in folder.parent.glob(f".{folder.name}.*"):  # by one that was killed
                    shutil.rmtree(left, ignore_errors=True)
            logger.info("preparing source %s, %.1f MB (once): %s", source.name, size_mb, folder)
            make_pieces(plan, tokenizer, pieces, self._workers)
            publish(
                folder,
                lambda work: _join(work, source, plan, pieces, tokenizer),
                is_made=lambda: _facts_of(folder) is not None,
            )
            shutil.rmtree(pieces, ignore_errors=True)

    def _trained(self, plans: Sequence[SourcePlan], name: str) -> TextTokenizer:
        """A new tokenizer, or the one that an interrupted preparation has trained."""
        folder = self._cache_dir / "tokenizers" / name
        if not folder.is_dir():
            started = time.perf_counter()
            room = self._config.tokenizer.train_bytes
            texts = [plan for plan in plans if plan.job.kind == "text"]
            sample = (text for plan in texts for text in training_texts(plan, room // len(texts)))
            trained = train_tokenizer(sample, self._config)
            publish(folder, lambda work: write_files(work, trained.files), is_made=folder.is_dir)
            logger.info("trained the tokenizer in %.1f s", time.perf_counter() - started)
        return load_tokenizer(folder)


def _check_trainable(sources: Sequence[SourceConfig]) -> None:
    for source in sources:
        if source.kind == "tokens":
            raise TrainValueError(
                f"{source.place} holds token ids, but no tokenizer is given that says what they "
                "mean; set tokenizer.file to the tokenizer that made them"
            )
    if not any(source.kind == "text" for source in sources):
        raise TrainValueError(
            f'there is no text to train a tokenizer on (kind="{sources[0].kind}"); set '
            "tokenizer.file to a folder with tokenizer.json and chat template, or model.init_from"
        )


def _join(
    work: Path, source: SourceConfig, plan: SourcePlan, pieces: Path, tokenizer: TextTokenizer
) -> None:
    """Write tokenizer, token files and facts of a source into the folder `work`."""
    left_out = Counter(plan.left_out)
    masked = source.kind not in ("text", "embedding")
    size = tokenizer.vocab_size
    with (
        new_store(work / "train.bin", vocab_size=size, with_mask=masked) as train,
        new_store(work / "validation.bin", vocab_size=size, with_mask=masked) as validation,
    ):
        writers = {"train": train, "validation": validation}
        for index, spans in enumerate(plan.pieces):
            piece = take_piece(pieces, index, spans)
            left_out.update(piece.left_out)
            for name, part in piece.parts.items():
                writers[name].add(part.tokens, part.begins, part.trained)
        _check_parts(source, writers, left_out)
    for reason, count in sorted(left_out.items()):
        logger.info("source %s: left out %d %s", source.name, count, reason)
    write_files(work, tokenizer.files)
    facts = {
        "vocab_size": size,
        "eos_token_id": tokenizer.document_end_id,
        "pad_token_id": tokenizer.pad_token_id,
        "left_out": left_out,
        "files": {name: file_digest(work / name) for name in tokenizer.files},
    }
    write_atomic(work / _FACTS, json.dumps(facts) + "\n")


def _check_parts(
    source: SourceConfig, writers: Mapping[str, StoreWriter], left_out: Mapping[str, int]
) -> None:
    for name, writer in writers.items():
        if not writer.num_tokens:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise TrainValueError(
                f"source {source.name} has nothing in its {name} part; left out were: "
                f"{reasons or 'nothing'}; add rows, or change data.validation_fraction"
            )
