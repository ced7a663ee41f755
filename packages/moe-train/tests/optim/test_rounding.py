import pytest
import torch

from moe_train.optim.rounding import StochasticRounding


def rounded(
    exact: torch.Tensor, *, update: int = 1, first: int = 0, column: int = 0, seed: int = 0
) -> torch.Tensor:
    to = torch.empty(exact.shape, dtype=torch.bfloat16)
    rounding = StochasticRounding(seed=seed, first={"w": (first, column)})
    rounding.write("w", exact, to, update=update)
    return to


def test_numbers_that_bfloat16_has_stay_and_all_others_become_a_neighbour(seed: int) -> None:
    exact = torch.cat((torch.randn(500, 7) * 1e3, torch.randn(500, 7) * 1e-6))
    low = exact.bfloat16().float()
    assert torch.equal(rounded(low).float(), low)
    down = (exact.view(torch.int32) & -65536).view(torch.float32)
    up = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    found = rounded(exact, seed=seed).float()
    assert ((found == down) | (found == up)).all()
    assert (found == down).any() and (found == up).any()


def test_the_mean_of_many_roundings_is_the_exact_number() -> None:
    exact = torch.tensor([1.001, -3.1, 1e-7, 257.3]).repeat(20_000, 1)
    for update in (1, 2):
        mean = rounded(exact, update=update).double().mean(0)
        step = 2.0**-7 * exact[0].double().abs()  # no more than the distance of neighbours
        # A mean of 20,000 is within 5 of its standard deviations, of at most half a step.
        assert ((mean - exact[0]).abs() <= 5 * 0.5 * step / 20_000**0.5).all()


def test_a_part_is_rounded_as_in_the_whole_and_each_update_otherwise(seed: int) -> None:
    exact = torch.randn(6, 4, 5)
    whole = rounded(exact)
    assert torch.equal(rounded(exact[2:5], first=2), whole[2:5])
    assert not torch.equal(rounded(exact[2:5]), whole[2:5])
    matrix = torch.randn(6, 9)
    part = rounded(matrix[1:4, 3:8], first=1, column=3)
    assert torch.equal(part, rounded(matrix)[1:4, 3:8])
    assert not torch.equal(rounded(exact, update=2), whole)
    assert not torch.equal(rounded(exact, seed=1), whole)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_every_shape_is_rounded_and_what_is_not_finite_stays(shape: tuple[int, ...]) -> None:
    for value in (1.5, float("inf"), float("-inf")):
        assert torch.equal(rounded(torch.full(shape, value)).float(), torch.full(shape, value))
    assert rounded(torch.full(shape, float("nan"))).isnan().all()
