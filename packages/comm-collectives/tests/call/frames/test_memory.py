"""The memory of flat tensors is that of their elements, without a copy, however they are given."""

import pytest
import torch

from comm_collectives.call.frames import Pieces, memory_of_each
from comm_collectives.errors import CommError


def _flats() -> dict[str, list[torch.Tensor] | Pieces]:
    whole = torch.arange(10, dtype=torch.uint8)
    return {
        "pieces": Pieces(whole, [3, 0, 5, 2]),
        "pieces of nothing": Pieces(whole[:0], [0, 0]),
        "split": list(whole.split([3, 0, 5, 2])),
        "apart": [whole[5:7].clone(), whole[:0], whole[1:4]],
        "one and the same": [whole] * 3,
        "one behind itself": [whole[:4], whole[:4].view(-1)],
    }


@pytest.mark.parametrize("name", _flats())
def test_memory_of_each_is_that_of_its_elements(name: str) -> None:
    flats = _flats()[name]
    memory, sizes = memory_of_each(flats)
    assert [list(one) for one in memory] == [flat.tolist() for flat in flats]
    assert sizes == [flat.numel() for flat in flats]
    for one in filter(len, memory):
        one[:] = bytes(len(one))
    assert not any(flat.any() for flat in flats)


def test_pieces_that_are_not_the_whole_are_refused() -> None:
    with pytest.raises(CommError, match="pieces of 4 bytes of a tensor of 5"):
        Pieces(torch.zeros(5, dtype=torch.uint8), [1, 3])
