"""Checks of what moves: values there and back, bytes on the wire, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mesh_spmd.creation import randn
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard import plan_reshard, reshard_tensor
from mesh_spmd.trials.case import At, Case
from mesh_spmd.trials.values import difference, known_part, num_digits


def check_reshard(at: At) -> list[str]:
    """Known values go to the target and back; every rank has its part after each way."""
    source, target = at.case.source, at.case.target
    back, found = source.reduced(), []
    for digit in range(num_digits(source)):
        there = reshard_tensor(_known(at, source, digit), source, target)
        again = reshard_tensor(there, target, back)
        found += difference(there, _known(at, target, digit), target, at.rank, "target")
        found += difference(again, _known(at, back, digit), back, at.rank, "back in the source")
    return found


def check_bytes(at: At) -> list[str]:
    """What a rank hands over for others, and takes from them, is what the plan says."""
    source, target, wire = at.case.source, at.case.target, _Wire()
    reshard_tensor(_known(at, source, 0), source, target, exchange=wire)
    plan = plan_reshard(source, target)
    pairs = (
        ("sent", wire.sent, plan.sent_bytes.get(at.rank, 0)),
        ("received", wire.received, plan.received_bytes.get(at.rank, 0)),
    )
    return [
        f"rank {at.rank}: got {real:,} bytes {what}, expected {planned:,} as planned"
        for what, real, planned in pairs
        if real != planned
    ]


def check_gradients(at: At) -> list[str]:
    """The backward takes known gradients of the target back to the source."""
    source, target = at.case.source, at.case.target
    local = _known(at, source, 0).requires_grad_()
    there = reshard_tensor(local, source, target)
    (gradient,) = torch.autograd.grad(there, local, _known(at, target, 0))
    back = source.reduced()
    return difference(gradient, _known(at, back, 0), back, at.rank, "gradient")


def check_random(at: At) -> list[str]:
    """Random numbers of one seed, made in the source layout, become those of the target layout."""
    source, target = at.case.source.reduced(), at.case.target
    made, wanted = (_random(at, tensor) for tensor in (source, target))
    there = reshard_tensor(made, source, target)
    return difference(there, wanted, target, at.rank, "random numbers")


def not_floating(case: Case) -> str:
    """Why gradients and random numbers are left out."""
    dtype = case.source.dtype
    return "" if dtype.is_floating_point else f"{dtype} is no floating dtype"


class _Wire:
    """torch's all_to_all_single, and the bytes between this rank and others."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group: ProcessGroup | None,
    ) -> Any:
        here = dist.get_rank(group)
        self.sent += sum(input_split_sizes) - input_split_sizes[here]
        self.received += sum(output_split_sizes) - output_split_sizes[here]
        return dist.all_to_all_single(
            output, input, list(output_split_sizes), list(input_split_sizes), group=group
        )


def _known(at: At, tensor: TensorSpec, digit: int) -> torch.Tensor:
    return known_part(tensor, at.rank, digit, device=at.device)


def _random(at: At, tensor: TensorSpec) -> torch.Tensor:
    if tensor.mesh.position(at.rank) is None:
        return torch.empty(0, dtype=tensor.dtype, device=at.device)
    return randn(tensor, at.rank, seed=at.case.world_size, device=at.device)
