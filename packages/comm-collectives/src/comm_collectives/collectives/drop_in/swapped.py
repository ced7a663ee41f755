"""Notice an input that was given in the output's place.

Torch's functions take the output first, and two tensors of the caller's do not say which is which.
But their sizes do where they fit only one way, the splits of the peers do where those differ, and
so does a gradient that is needed of the output alone.

    check_output(output, input, fits=times(world_size, "output", "input"))
    sent, received = both_splits(output, input, None, None, world_size)
"""

from collections.abc import Callable, Sequence

import torch

from comm_collectives.base import check_apart, check_dense
from comm_collectives.collectives import checked_splits
from comm_collectives.errors import CommTypeError, CommValueError


def check_output(
    output: torch.Tensor, input: torch.Tensor, fits: Callable[[torch.Tensor, torch.Tensor], str]
) -> None:
    """Check that `output` can take the result of `input`.

    Args:
        fits: says why the shape of an output does not fit an input, "" if it does.

    Raises:
        TypeError: one is not a dense tensor of a plain dtype, or their dtypes differ.
        ValueError: devices or shapes do not fit, elements of the output share memory, or the two
            look swapped.
    """
    check_dense(output, "output")
    check_dense(input, "input")
    if output.dtype != input.dtype:
        raise CommTypeError(
            f"output is {output.dtype} but input is {input.dtype}; give an output of the input's "
            "dtype"
        )
    if output.device.type != input.device.type:
        raise CommValueError(f"output is on {output.device} but input on {input.device}; use one")
    order = "output is the first argument and input the second"
    if output.requires_grad and not input.requires_grad:
        raise CommValueError(
            f"output needs a gradient and input does not, as if they were swapped: {order}; if "
            "they are not, give output.detach()"
        )
    problem = fits(output, input)
    if problem:
        swapped = "" if fits(input, output) else f"; they fit the other way round: {order}"
        raise CommValueError(problem + swapped)
    check_apart(output, "output")


def same_rows(output: torch.Tensor, input: torch.Tensor) -> str:
    """Say why the rows of two tensors are not alike, "" if they are."""
    if output.dim() and input.dim() and output.shape[1:] == input.shape[1:]:
        return ""
    return (
        f"output has shape {list(output.shape)} but input {list(input.shape)}; give both dims, "
        "of which all but the first are equal"
    )


def both_splits(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    size: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows sent to and received from each rank.

    Raises:
        TypeError: splits are not integers.
        ValueError: they do not fit the tensors or the group.
    """

    def checked(name: str, splits: Sequence[int] | None, x: torch.Tensor) -> tuple[int, ...]:
        rows = len(x)
        if splits is None or (isinstance(splits, Sequence) and not splits):
            if rows % size:
                raise CommValueError(
                    f"{name} has {rows} rows, which {size} ranks cannot share evenly; give "
                    f"{name}_split_sizes"
                )
            return (rows // size,) * size
        return checked_splits(splits, size, f"{name}_split_sizes")

    sent, received = checked("input", input_splits, input), checked("output", output_splits, output)
    if (sum(sent), sum(received)) == (len(input), len(output)):
        return sent, received
    swapped = ""
    if (sum(sent), sum(received)) == (len(output), len(input)):
        swapped = "; they fit the other way round: output comes before input, and so do the splits"
    raise CommValueError(
        f"input_split_sizes={list(sent)} and output_split_sizes={list(received)} do not fit input, "
        f"which has {len(input)} rows, and output, which has {len(output)}{swapped}"
    )


def times(size: int, whole: str, part: str) -> Callable[[torch.Tensor, torch.Tensor], str]:
    """Return what says why the first of two tensors is not `size` times the second."""

    def fits(large: torch.Tensor, small: torch.Tensor) -> str:
        stacked = (size, *small.shape)
        joined = (size * small.shape[0], *small.shape[1:]) if small.dim() else stacked
        if tuple(large.shape) in (stacked, joined):
            return ""
        return (
            f"{whole} has shape {list(large.shape)} and {part} {list(small.shape)}; with {size} "
            f"ranks give {whole} of shape {list(joined)} or {list(stacked)}"
        )

    return fits
