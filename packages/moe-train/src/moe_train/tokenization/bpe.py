"""Byte-level BPE: train it on a sample of a corpus.

Invariant: any text is encoded without loss, and the same texts give the same tokenizer.

    files = train_bpe(["def f(): ..."], vocab_size=300)
"""

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from moe_train.tokenization.folder import GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, to_json

END_OF_TEXT = "<|endoftext|>"
"""The only special token of a trained tokenizer: id 0, and end and padding at once."""


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> dict[str, bytes]:
    """The files of a byte-level BPE; the same texts give the same bytes.

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
    end_id = 0  # special tokens come first
    return {
        TOKENIZER: tokenizer.to_str(pretty=True).encode(),
        TOKENIZER_CONFIG: to_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "eos_token": END_OF_TEXT,
                "pad_token": END_OF_TEXT,
            }
        ),
        GENERATION_CONFIG: to_json(
            {"do_sample": True, "eos_token_id": end_id, "pad_token_id": end_id}
        ),
    }
