"""The corpus as a rank sees it: opened where tokens are needed, known everywhere."""

from dataclasses import asdict, dataclass
from typing import Any

from comm_collectives import broadcast_nested
from moe_train.config import Config
from moe_train.data import PackedSplit, PreparedCorpus, SampleOrder
from moe_train.errors import TrainValueError
from moe_train.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What every rank must know of the corpus, also those that read none of it."""

    num_train_sequences: int
    num_validation_sequences: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What training reads: the splits (None on stages that need no tokens) and their order."""

    train: PackedSplit | None
    validation: PackedSplit | None
    order: SampleOrder
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
            num_train_sequences=train.num_sequences,
            num_validation_sequences=validation.num_sequences,
            fingerprint=prepared.fingerprint,
        )
    given = None if own is None else asdict(own)
    told: Any = broadcast_nested(given, src=0, timeout_s=config.parallel.timeout_s)
    facts = CorpusFacts(**told)
    if own is not None and own != facts:
        raise TrainValueError(
            f"rank {parallel.rank} reads another corpus than rank 0: {own} and {facts}; "
            "give every machine the same files"
        )
    order = SampleOrder(facts.num_train_sequences, config.train.seed)
    return Corpus(train=train, validation=validation, order=order, facts=facts)


def open_splits(config: Config, prepared: PreparedCorpus) -> tuple[PackedSplit, PackedSplit]:
    """The training and the validation split."""
    length, eos = config.data.sequence_length, prepared.eos_token_id
    reset = config.data.reset_at_documents
    return (
        PackedSplit(prepared.train_tokens, length, eos, reset),
        PackedSplit(prepared.validation_tokens, length, eos, reset),
    )
