import pytest
import torch

from moe_train.model.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
)
from moe_train.model.rotary import RotaryOptions, inverse_frequencies, rotary_tables

PLAIN = RotaryOptions(dim=8, theta=100.0)


def scaled(scaling: RopeScaling) -> RotaryOptions:
    return RotaryOptions(dim=8, theta=100.0, scaling=scaling)


def test_linear_divides_all_frequencies() -> None:
    got = inverse_frequencies(scaled(LinearScaling(factor=4.0)))
    torch.testing.assert_close(got, inverse_frequencies(PLAIN) / 4)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    llama3 = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    fast = inverse_frequencies(PLAIN)
    ratio = inverse_frequencies(scaled(llama3)) / fast  # of 10.2, 3.2, 1.0 and 0.3 turns
    torch.testing.assert_close(ratio[[0, 3]], torch.tensor([1.0, 1 / 8]))
    turns = 64 * fast[1] / (2 * torch.pi)
    share = (turns - 1) / 3
    torch.testing.assert_close(ratio[1], share + (1 - share) / 8)


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(factor=3.0, max_position_embeddings=4),
        LongRopeScaling(
            short_factor=(1.0, 1.1, 1.2, 1.3),
            long_factor=(1.0, 2.0, 3.0, 4.0),
            original_max_position_embeddings=4,
            attention_factor=1.5,
        ),
    ],
)
def test_a_document_is_turned_by_its_own_length_wherever_it_stands(scaling: RopeScaling) -> None:
    options = scaled(scaling)

    def alone(length: int) -> torch.Tensor:
        return rotary_tables(torch.arange(length)[None], options, torch.float32)[0][0]

    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3, 4, -1, -1]])
    cos, _ = rotary_tables(packed, options, torch.float32)
    assert torch.equal(cos[0, :3], alone(3))
    assert torch.equal(cos[0, 3:], alone(6))
    assert torch.equal(cos[1, 2:7], alone(5))
    assert not torch.equal(alone(3), alone(5)[:3])
    torch.testing.assert_close(alone(3), alone(4)[:3])  # both within the original context


def test_two_dims_cannot_be_dynamic_and_the_borders_of_llama3_have_an_order() -> None:
    two = RotaryOptions(
        dim=2, theta=100.0, scaling=DynamicScaling(factor=2.0, max_position_embeddings=4)
    )
    with pytest.raises(ValueError, match="2 dims"):
        inverse_frequencies(two)
    with pytest.raises(ValueError, match="low_freq_factor=4"):
        Llama3Scaling(
            factor=8.0,
            low_freq_factor=4.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=64,
        )
