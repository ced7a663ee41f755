"""Byte-level BPE: train it on a sample, read it back, encode many documents at once.

Invariant: any text is encoded without loss, and text that looks like a special token stays text, so
that the end-of-text token in a token file always means the end of a document.

    tokenizer = train_bpe(["def f(): ..."], vocab_size=300)
    encode_batch(tokenizer, ["def g(): ..."])
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from moe_train.errors import TrainValueError

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a trained tokenizer: id 0, and begin, end and padding at once."""

_END_TOKENS = (END_OF_TEXT, "</s>", "<eos>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "[SEP]")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: the sample.
        vocab_size: tokens at most, with the 256 bytes and the end-of-text token; a small sample
            may not have as many.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        ValueError: the file cannot be read as a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainValueError(f"tokenizer.file={path} cannot be read: {error}") from error
    try:
        return Tokenizer.from_str(text)
    # tokenizers raises a bare Exception for a file that it cannot read.
    except Exception as error:
        raise TrainValueError(f"tokenizer.file={path} is not a tokenizer.json: {error}") from error


def end_token_id(tokenizer: Tokenizer, source: str) -> int:
    """The id of the token that ends a document.

    Args:
        source: where the tokenizer comes from, for the message.

    Raises:
        ValueError: the tokenizer has none of the usual end tokens.
    """
    for token in _END_TOKENS:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return int(token_id)
    raise TrainValueError(
        f"{source} has no end-of-text token; expected one of {', '.join(_END_TOKENS)}. "
        f"Add {END_OF_TEXT} to its special tokens"
    )


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Token ids of each text, int64 [N]; runs on all cores. No special token is added or read."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
