"""Padding: places of a batch that hold no token.

A layer computes what it would of the same batch without them: they are routed to no expert, take no
room, and count in no load, loss or bias; their output is 0. So they are taken out before the router
sees them and put back at the end, which leaves nothing for other code to get wrong, and NaN in
padding reaches nothing. Where there is no padding (None) nothing is copied and nothing is asked of
the device.

    out = layer(x_BSD, token_idx_N=is_token_BS.flatten().nonzero().flatten())

Dims: T places of this rank, N of them tokens.
"""

import torch
from torch import Tensor

from moe_pipeline._checks import check_type
from moe_pipeline.errors import MoETypeError, MoEValueError


def without_padding(
    name: str, each_T: Tensor | None, token_idx_N: Tensor, num_places: int
) -> Tensor | None:
    """The rows [N, ...] of the tokens among [T, ...], of None None. Differentiable.

    Raises:
        ValueError: not a row for each place.
    """
    if each_T is not None and each_T.shape[:1] != (num_places,):
        raise MoEValueError(
            f"{name} has shape {tuple(each_T.shape)}, but there are {num_places} places; with "
            "token_idx_N give a row for each place, also for those of padding"
        )
    return None if each_T is None else each_T.index_select(0, token_idx_N)


def with_padding(
    each_N: Tensor, token_idx_N: Tensor | None, num_places: int, fill: int = 0
) -> Tensor:
    """The rows at their places in [T, ...], with `fill` in those of padding. Differentiable."""
    if token_idx_N is None:
        return each_N
    each_T = each_N.new_full((num_places, *each_N.shape[1:]), fill)
    return each_T.index_copy(0, token_idx_N, each_N)


def check_token_idx(token_idx_N: Tensor, num_places: int) -> None:
    """Refuse what cannot be places; their values are not read, which would wait for the device.

    Raises:
        ValueError, TypeError: no tensor, not 1-d, more than there are places, or not int64.
    """
    check_type("token_idx_N", token_idx_N, Tensor)
    if token_idx_N.dtype != torch.int64:
        raise MoETypeError(
            f"token_idx_N is {token_idx_N.dtype}; give the places of the tokens as int64: "
            "is_token_T.nonzero().flatten()"
        )
    if token_idx_N.dim() != 1 or token_idx_N.shape[0] > num_places:
        raise MoEValueError(
            f"token_idx_N has shape {tuple(token_idx_N.shape)}, but there are {num_places} places; "
            "give each token's place once: is_token_T.nonzero().flatten()"
        )
