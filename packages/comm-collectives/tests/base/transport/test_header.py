"""Transfer headers: what goes in comes out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_collectives.base.transport.header import TransferHeader
from comm_collectives.base.wire import DTYPES

_shapes = st.lists(st.integers(min_value=0, max_value=2**40), max_size=6).map(tuple)
_tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), _shapes, st.sampled_from(["cpu", "cuda"])), max_size=30
)


@given(_tensors, st.integers(0, 3))
def test_header_survives_its_bytes(
    tensors: list[tuple[torch.dtype, tuple[int, ...], str]], flags: int
) -> None:
    header = TransferHeader(
        dtypes=tuple(t[0] for t in tensors),
        shapes=tuple(t[1] for t in tensors),
        travels=tuple(t[2] for t in tensors),
        flags=flags,
    )
    assert TransferHeader.unpack(header.pack()) == header


def test_foreign_words_are_no_header() -> None:
    assert TransferHeader.unpack(b"") is None
    assert TransferHeader.unpack(bytes(384)) is None
