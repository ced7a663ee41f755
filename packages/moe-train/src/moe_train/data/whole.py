"""All of some token files, to be measured: every token but the first of a document is predicted.

Documents stand whole in the sequences, packed by best fit; one that is longer than a sequence is
cut into pieces. Nothing is held out, and nothing is dropped, other than in training.

    files = TokenFiles.of_corpus(prepared)                    # what a job holds out
    files = TokenFiles.of_source(source, tokenizer, folder)   # all of some files
    files.open(256, tokenizer.pad_token_id).batch([0, 1])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_train.config import SourceConfig
from moe_train.data.joined import JoinedSplit
from moe_train.data.mixture import Mixture
from moe_train.data.packing import SequenceForm, open_split
from moe_train.data.pool import make_pieces
from moe_train.data.prepare import PreparedCorpus
from moe_train.data.token_store import new_store, open_store
from moe_train.errors import TrainValueError
from moe_train.reading import find_files, plan_source, take_piece
from moe_train.tokenization import TextTokenizer

_READ_KINDS = ("text", "chat", "tokens")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Token files whose documents are all read."""

    paths: tuple[Path, ...]

    @classmethod
    def of_corpus(cls, prepared: PreparedCorpus) -> "TokenFiles":
        """The held-out documents of every source."""
        return cls(tuple(source.validation for source in prepared.sources))

    @classmethod
    def of_source(
        cls, source: SourceConfig, tokenizer: TextTokenizer, folder: Path
    ) -> "TokenFiles":
        """All documents of a source, encoded into `folder`.

        Raises:
            FileNotFoundError: a file does not exist.
            ValueError: a file or a row cannot be used.
        """
        if source.kind not in _READ_KINDS:
            raise TrainValueError(
                f"kind={source.kind!r} has no tokens to predict; choose {', '.join(_READ_KINDS)}"
            )
        plan = plan_source(
            source,
            find_files(source),
            fraction=0.0,
            end_id=tokenizer.document_end_id,
            unpacked=folder / "unpacked",
        )
        make_pieces(plan, tokenizer, folder / "pieces", 1)
        path = folder / "tokens.bin"
        size, masked = tokenizer.vocab_size, source.kind != "text"
        with new_store(path, vocab_size=size, with_mask=masked) as store:
            for index, spans in enumerate(plan.pieces):
                for part in take_piece(folder / "pieces", index, spans).parts.values():
                    store.add(part.tokens, part.begins, part.trained)
        return cls((path,))

    def open(self, sequence_length: int, pad_token_id: int) -> JoinedSplit:
        """The sequences of all files.

        Raises:
            ValueError: there is no document with a token.
        """
        form = SequenceForm(length=sequence_length, pad_token_id=pad_token_id)
        splits = tuple(open_split(path, "best_fit", form) for path in self.paths)
        return JoinedSplit(
            names=tuple(path.name for path in self.paths),
            splits=splits,
            order=Mixture([split.num_sequences for split in splits]),
        )

    def num_bytes(self, tokenizer: TextTokenizer) -> int | None:
        """UTF-8 bytes of the text of all documents; None where some tokens are no targets."""
        stores = [open_store(path) for path in self.paths]
        if any(store.trained is not None for store in stores):
            return None
        return sum(
            _num_bytes(store.tokens[begin:end].tolist(), tokenizer)
            for store in stores
            for begin, end in zip(store.starts[:-1], store.starts[1:], strict=True)
        )


def _num_bytes(ids: Sequence[int], tokenizer: TextTokenizer) -> int:
    ends = bool(ids) and ids[-1] == tokenizer.document_end_id
    text = tokenizer.decode(ids[:-1] if ends else ids)  # BOS is no text; "<s>" as text stays text
    return len(text.encode())
