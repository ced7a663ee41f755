"""The corpus as a rank sees it: opened where tokens are needed, known everywhere."""

from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from comm_collectives import broadcast_nested
from moe_train.config import Config
from moe_train.data import DataIdentity, JoinedSplit, PreparedCorpus, SourceShare, open_joined
from moe_train.errors import TrainValueError
from moe_train.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What every rank must know of the corpus, also those that read none of it."""

    sources: tuple[SourceShare, ...]
    num_validation_sequences: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What training reads: the parts (None on stages that need no tokens) and what samples mean."""

    train: JoinedSplit | None
    validation: JoinedSplit | None
    data: DataIdentity
    facts: CorpusFacts


def open_corpus(config: Config, parallel: Parallel, prepared: PreparedCorpus | None) -> Corpus:
    """Open the splits of `prepared` and tell every rank about them. Collective over all ranks.

    Args:
        prepared: None on stages that need no tokens; rank 0, on the first stage, always has one.

    Raises:
        ValueError: this rank's corpus is not that of rank 0.
    """
    train = validation = None
    own: CorpusFacts | None = None
    if prepared is not None:
        train, validation = open_splits(config, prepared)
        own = CorpusFacts(
            sources=source_shares(prepared, train),
            num_validation_sequences=validation.num_sequences,
            fingerprint=prepared.fingerprint,
        )
    given = None if own is None else asdict(own)
    told: Any = broadcast_nested(given, src=0, timeout_s=config.parallel.timeout_s)
    shares = tuple(SourceShare(**source) for source in told["sources"])
    facts = CorpusFacts(**{**told, "sources": shares})
    if own is not None and own != facts:
        raise TrainValueError(
            f"rank {parallel.rank} reads another corpus than rank 0: {own} and {facts}; "
            "give every machine the same files"
        )
    data = DataIdentity(
        fingerprint=facts.fingerprint,
        sequence_length=config.data.sequence_length,
        seed=config.train.seed,
        sources=facts.sources,
    )
    return Corpus(train=train, validation=validation, data=data, facts=facts)


def known_corpus(own: PreparedCorpus | None) -> PreparedCorpus | None:
    """The corpus as this rank has read it, or as rank 0 has, if this machine has that too.

    Collective over all ranks.
    """
    told = [own]
    dist.broadcast_object_list(told, src=0)
    given = told[0]
    is_here = given is not None and all(path.exists() for path in given.paths)
    return own or (given if is_here else None)


def open_splits(config: Config, prepared: PreparedCorpus) -> tuple[JoinedSplit, JoinedSplit]:
    """The training and the validation part; in each `batch(numbers)` reads `num_sequences`.

    Raises:
        ValueError: a source is too small, cannot be packed as asked, or is not trained on.
    """
    return open_joined(
        prepared,
        sequence_length=config.data.sequence_length,
        reset_at_documents=config.data.reset_at_documents,
    )


def source_shares(prepared: PreparedCorpus, train: JoinedSplit) -> tuple[SourceShare, ...]:
    """The sources by name, weight and number of sequences."""
    return tuple(
        SourceShare(name=source.name, weight=repr(source.weight), num_sequences=split.num_sequences)
        for source, split in zip(prepared.sources, train.splits, strict=True)
    )
