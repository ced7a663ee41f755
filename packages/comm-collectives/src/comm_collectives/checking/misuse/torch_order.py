"""Deliberate mistakes with the functions in torch's argument order. Each line is that of a program.

TORCH_ORDER_MISUSES[0].run(At(rank=1, size=2))      # the same error on every rank
"""

import torch
import torch.distributed as dist

from comm_collectives.checking.misuse.outcome import REFUSAL, TYPE_REFUSAL, At, Misuse
from comm_collectives.collectives import drop_in

_ROWS = 50  # of two numbers each, which is more than travels with a control exchange


def _rows(ranks: int = 1) -> torch.Tensor:
    return torch.ones(_ROWS * ranks, 2)


def _all_swap_exchange(at: At) -> None:
    """The tensors are swapped, the splits are not."""
    x, output, sent, expected = _everything_to_first(at)
    drop_in.all_to_all_single(x, output, expected, sent)


def _one_swaps_exchange(at: At) -> None:
    """The odd rank swaps the splits too, so that nothing is wrong with its arguments alone."""
    x, output, sent, expected = _everything_to_first(at)
    arguments = at.pick((x, output, sent, expected), (output, x, expected, sent))
    drop_in.all_to_all_single(*arguments)


def _everything_to_first(at: At) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    expected = [_ROWS if at.rank == 0 else 0] * at.size
    return _rows(), torch.ones(sum(expected), 2), [_ROWS] + [0] * (at.size - 1), expected


def _one_swaps_gather(at: At) -> None:
    whole, part = _rows(at.size), _rows()
    drop_in.all_gather_into_tensor(*at.pick((part, whole), (whole, part)))


def _all_swap_scatter(at: At) -> None:
    drop_in.reduce_scatter_tensor(_rows(at.size), _rows())


def _swapped_with_gradient(at: At) -> None:
    weights, room = _rows(at.size).requires_grad_(), _rows(at.size)
    drop_in.all_to_all_single(weights, room)


def _splits_disagree_in_place(at: At) -> None:
    expected = [_ROWS if at.rank == 0 else 0] * at.size
    if at.odd:
        expected[0] += 1
    sent = [_ROWS] + [0] * (at.size - 1)
    drop_in.all_to_all_single(torch.ones(sum(expected), 2), _rows(), expected, sent)


TORCH_ORDER_MISUSES = (
    Misuse(
        name="torch order: all ranks swap input and output of all_to_all_single",
        run=_all_swap_exchange,
        error=REFUSAL,
        says=("the other way round", "rank 0: "),
    ),
    Misuse(
        name="torch order: one rank swaps input and output of all_to_all_single",
        run=_one_swaps_exchange,
        sides=1,
        says=("all fit if", "{odd} gave input", "output's place"),
    ),
    Misuse(
        name="torch order: one rank swaps input and output of all_gather_into_tensor",
        run=_one_swaps_gather,
        error=REFUSAL,
        says=("the other way round", "{odd}: "),
    ),
    Misuse(
        name="torch order: all ranks swap input and output of reduce_scatter_tensor",
        run=_all_swap_scatter,
        error=REFUSAL,
        says=("the other way round",),
    ),
    Misuse(
        name="torch order: swapped tensors of one size, one needs a gradient",
        run=_swapped_with_gradient,
        error=REFUSAL,
        says=("as if they were swapped",),
    ),
    Misuse(
        name="torch order: splits disagree",
        run=_splits_disagree_in_place,
        sides=1,
        says=("sends 0 rows to {odd}", "expects 1"),
    ),
    Misuse(
        name="torch order: output too short on one rank",
        run=lambda at: drop_in.all_gather_into_tensor(_rows(at.size)[at.odd :], _rows()),
        error=REFUSAL,
        says=("output has shape", "{odd}: "),
    ),
    Misuse(
        name="torch order: output of another dtype on one rank",
        run=lambda at: drop_in.all_gather_into_tensor(
            at.pick(_rows(at.size).int(), _rows(at.size)), _rows()
        ),
        error=TYPE_REFUSAL,
        says=("output is torch.int32", "{odd}: "),
    ),
    Misuse(
        name="torch order: elements of the output share memory on one rank",
        run=lambda at: drop_in.all_reduce(at.pick(torch.ones(1, 2).expand(_ROWS, 2), _rows())),
        error=REFUSAL,
        says=("share memory", "{odd}: "),
    ),
    Misuse(
        name="torch order: no tensor on one rank",
        run=lambda at: drop_in.broadcast(at.pick([1.0], at.x), src=0),
        error=TYPE_REFUSAL,
        says=("list", "{odd}: "),
    ),
    Misuse(
        name="torch order: op differs",
        run=lambda at: drop_in.all_reduce(at.x, at.pick(dist.ReduceOp.MAX, dist.ReduceOp.SUM)),
        says=("op=max", "op=sum", "{odd}: "),
    ),
    Misuse(
        name="torch order: op without meaning here on one rank",
        run=lambda at: drop_in.all_reduce(
            at.x.int(), at.pick(dist.ReduceOp.BXOR, dist.ReduceOp.SUM)
        ),
        error=REFUSAL,
        says=("op=", "{odd}: "),
    ),
    Misuse(
        name="torch order: sum of fp8",
        run=lambda at: drop_in.reduce_scatter_tensor(
            _rows().to(torch.float8_e5m2), _rows(at.size).to(torch.float8_e5m2)
        ),
        error=TYPE_REFUSAL,
        says=("float8_e5m2", "op='sum'"),
    ),
    Misuse(
        name="torch order: lengths differ",
        run=lambda at: drop_in.all_reduce(at.x[at.odd :]),
        says=("shape", "(2999,)", "{odd}: "),
    ),
    Misuse(
        name="torch order: source differs",
        run=lambda at: drop_in.broadcast(at.x, src=at.pick(at.rank, 0)),
        says=("src", "{odd}: "),
    ),
    Misuse(
        name="torch order: source outside the group on one rank",
        run=lambda at: drop_in.broadcast(at.x, src=at.pick(at.size, 0)),
        error=REFUSAL,
        says=("src=", "{odd}: "),
    ),
    Misuse(
        name="torch order: receiver of a broadcast is longer",
        run=lambda at: drop_in.broadcast(at.pick(at.x, at.x[:2000]), src=0),
        sides=1,
        says=("2000", "3000", "{odd}"),
    ),
    Misuse(
        name="torch order: all_gather_into_tensor and all_to_all_single",
        run=lambda at: at.pick(drop_in.all_gather_into_tensor, drop_in.all_to_all_single)(
            _rows(at.size), at.pick(_rows(), _rows(at.size))
        ),
        says=("operation", "{odd}: "),
    ),
)
