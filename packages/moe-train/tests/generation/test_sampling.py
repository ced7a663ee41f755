"""Draws have the probabilities asked for; the order of the processors is held against transformers
in integration_tests/end_to_end/test_generation.py.
"""

import pytest
import torch

from moe_train.generation.options import GenerationOptions
from moe_train.generation.sampling import next_token, seeded_generator

GREEDY = GenerationOptions()


def test_temperature_0_and_a_top_k_of_1_take_the_most_probable_token() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    generator = torch.Generator().manual_seed(0)
    one = GenerationOptions(temperature=5.0, top_k=1)
    for options in (GREEDY, one, GenerationOptions(temperature=5.0, top_p=1e-9)):
        assert {next_token(logits, [], options, generator) for _ in range(20)} == {1}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (2.0, 0), (0.5, 2), (1.0, 9)])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(
    temperature: float, top_k: int
) -> None:
    logits = torch.tensor([0.5, 2.0, 1.0, -3.0])
    expected = (logits.double() / temperature).softmax(0)
    if top_k == 2:
        expected = torch.tensor([0.0, expected[1], expected[2], 0.0])
        expected /= expected.sum()
    options = GenerationOptions(temperature=temperature, top_k=top_k)
    generator = torch.Generator().manual_seed(0)
    drawn = [next_token(logits, [], options, generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    # Four standard deviations of a share of 4000 draws are at most 0.032.
    torch.testing.assert_close(shares.double(), expected.double(), rtol=0, atol=0.032)
    assert bool((shares[expected == 0] == 0).all())


def test_the_penalty_also_acts_where_the_most_probable_token_is_taken() -> None:
    logits, generator = torch.tensor([-1.0, 3.0, 2.9]), torch.Generator()
    penalised = GenerationOptions(repetition_penalty=1.5)
    assert next_token(logits, [1], penalised, generator) == 2
    assert next_token(logits, [1, 1, 2, 900], penalised, generator) == 1
    assert next_token(-logits, [0], penalised, generator) == 0


def test_a_generator_is_a_function_of_seed_and_number() -> None:
    draws = {
        (seed, number): torch.rand(2, generator=seeded_generator(seed, number)).tolist()
        for seed in (0, 1, 2**63 - 1)
        for number in (0, 1)
    }
    assert len({tuple(draw) for draw in draws.values()}) == 6
    assert torch.rand(2, generator=seeded_generator(1, 0)).tolist() == draws[1, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="logits are not finite numbers; the weights are damaged"):
        next_token(torch.tensor([0.0, value]), [], GREEDY, torch.Generator())


def test_the_smallest_temperature_and_penalty_still_draw_the_most_probable_token() -> None:
    logits, generator = torch.tensor([1e4, 3.0, -1e4]), torch.Generator().manual_seed(0)
    for penalty in (1e-15, 1e15):
        cold = GenerationOptions(temperature=1e-15, repetition_penalty=penalty)
        expected = 0 if penalty < 1 else 1
        assert next_token(logits, [0], cold, generator) == expected
