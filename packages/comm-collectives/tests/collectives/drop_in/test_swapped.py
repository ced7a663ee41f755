"""Swapped tensors: what their sizes, splits and gradients tell, and what they cannot."""

import pytest
import torch

from comm_collectives.collectives.drop_in.swapped import both_splits, check_output, same_rows, times


def test_sizes_that_fit_only_the_other_way_round_are_told() -> None:
    fits = times(3, "output", "input")
    check_output(torch.ones(6, 2), torch.ones(2, 2), fits)
    check_output(torch.ones(3, 2, 2), torch.ones(2, 2), fits)
    with pytest.raises(ValueError, match="they fit the other way round: output is the first"):
        check_output(torch.ones(2, 2), torch.ones(6, 2), fits)
    with pytest.raises(ValueError, match=r"give output of shape \[6, 2\] or \[3, 2, 2\]$"):
        check_output(torch.ones(5, 2), torch.ones(2, 2), fits)


def test_splits_that_fit_only_the_other_way_round_are_told() -> None:
    output, x = torch.ones(5, 2), torch.ones(3, 2)
    assert same_rows(output, x) == ""
    assert both_splits(output, x, [1, 4], [3, 0], 2) == ((3, 0), (1, 4))
    with pytest.raises(ValueError, match="they fit the other way round: output comes before"):
        both_splits(x, output, [1, 4], [3, 0], 2)
    with pytest.raises(ValueError, match=r"which has 3 rows, and output, which has 5$"):
        both_splits(output, x, [1, 3], [3, 0], 2)


def test_splits_that_are_no_sequence_are_named() -> None:
    x = torch.ones(4)
    assert both_splits(x, x, [], (), 2) == ((2, 2), (2, 2))
    with pytest.raises(TypeError, match="output_split_sizes=2 must be a sequence of integers"):
        both_splits(x, x, 2, None, 2)  # type: ignore[arg-type]


def test_equal_sizes_do_not_tell() -> None:
    """The limit that the documentation states."""
    a, b = torch.ones(4), torch.ones(4)
    assert both_splits(a, b, None, None, 2) == both_splits(b, a, None, None, 2)


def test_gradient_that_only_the_output_needs_is_told() -> None:
    output = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="as if they were swapped"):
        check_output(output, torch.ones(2), same_rows)
    check_output(output, torch.ones(2, requires_grad=True), same_rows)
    check_output(output.detach(), torch.ones(2), same_rows)
