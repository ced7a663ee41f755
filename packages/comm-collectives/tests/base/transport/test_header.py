"""Transfer headers: what goes in comes out, in one message or two."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_collectives.base.transport.header import FIRST_WORDS, TransferHeader
from comm_collectives.base.wire import DTYPES

_shapes = st.lists(st.integers(min_value=0, max_value=2**40), max_size=6).map(tuple)
_tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), _shapes, st.sampled_from(["cpu", "cuda"])), max_size=30
)


@given(st.integers(min_value=1, max_value=2**60), _tensors, st.integers(0, 3), st.binary())
def test_header_survives_its_messages_and_its_bytes(
    number: int,
    tensors: list[tuple[torch.dtype, tuple[int, ...], str]],
    flags: int,
    after: bytes,
) -> None:
    header = TransferHeader(
        number=number,
        dtypes=tuple(t[0] for t in tensors),
        shapes=tuple(t[1] for t in tensors),
        travels=tuple(t[2] for t in tensors),
        flags=flags,
    )
    messages = header.to_messages()
    assert messages[0].numel() == FIRST_WORDS
    first = messages[0].tolist()
    assert TransferHeader.words_to_come(first) == sum(m.numel() for m in messages[1:])
    assert TransferHeader.from_words([w for m in messages for w in m.tolist()]) == header
    assert TransferHeader.unpack(header.pack() + after) == (header, after)


def test_foreign_words_are_no_header() -> None:
    words = [1] * FIRST_WORDS
    assert TransferHeader.words_to_come(words) == 0
    assert TransferHeader.from_words(words) is None
    assert TransferHeader.unpack(b"") == (None, b"")
    assert TransferHeader.unpack(bytes(384)) == (None, bytes(384))
