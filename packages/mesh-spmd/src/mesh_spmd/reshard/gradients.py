"""Resharding that gradients flow through: the backward moves them the other way.

A gradient lies as its tensor does; where the values are partial, it is replicated, as in DTensor.
Invariant: forward and backward are collective on the same ranks, also on those that hold nothing.
Such a rank gets an empty tensor, and its backward has to run too: add its sum to the rank's loss.

    held = split_tensor(local, whole, [stage_0, stage_1])   # this rank's part on each stage
    local = join_tensors(held, [stage_0, stage_1], whole)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.execute import Exchange, check_running, device_of, execute
from mesh_spmd.reshard.parts import plan_join, plan_split
from mesh_spmd.reshard.plan import Plan, plan_reshard

Local = torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """The plans of both directions, and what carries their bytes.

    again: of the gradient's gradient, which goes forward; partial sums have been reduced by then.
    """

    forward: Plan
    backward: Callable[[], Plan]
    again: Callable[[], Plan]
    group: ProcessGroup | None
    exchange: Exchange | None

    def turned(self) -> _Ways:
        return _Ways(
            forward=self.backward(),
            backward=self.again,
            again=self.backward,
            group=self.group,
            exchange=self.exchange,
        )


def reshard_tensor(
    local: Local,
    source: TensorSpec,
    target: TensorSpec,
    group: ProcessGroup | None = None,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    """Return this rank's part in the target's layout; gradients flow back. Collective.

    Args:
        local: what this rank holds of the source; None outside its mesh, or as of `execute`. Such
            ranks always record a backward: of a tensor that needs no gradient, call under no_grad.
        source: the tensor before. It may have partial sums; their gradient is replicated.
        target: the tensor after.
        group: holds every rank of both meshes; the default group if None.
        exchange: as of `execute`.

    Returns:
        A new tensor; an empty one on a rank outside the target's mesh.

    Raises:
        MeshTypeError: the source is partial in another way than a sum, or the target is partial.
        MeshValueError: shapes or dtypes differ.
    """
    forward = plan_reshard(source, target)
    after, before = _gradient(target, is_source=False), _gradient(source, is_source=True)
    back = plan_reshard(after, before)
    again = (lambda: plan_reshard(before, after)) if source.partials else (lambda: forward)
    ways = _Ways(
        forward=forward, backward=lambda: back, again=again, group=group, exchange=exchange
    )
    return _run(ways, [local])[0]


def split_tensor(
    local: Local,
    whole: TensorSpec,
    parts: Sequence[TensorSpec],
    group: ProcessGroup | None = None,
    *,
    dim: int = 0,
    exchange: Exchange | None = None,
) -> list[torch.Tensor]:
    """Return this rank's local tensor of each part of a whole tensor; gradients flow back.

    Collective: every rank of `group` calls. The parts follow each other along `dim`, each on a mesh
    of its own. A part that this rank holds nothing of is an empty tensor.

    Raises:
        MeshTypeError: something is partial.
        MeshValueError: the parts do not make up the whole.
    """
    forward = plan_split(whole, parts, dim=dim)
    ends = [_gradient(t, is_source=False) for t in (whole, *parts)]
    back = plan_join(ends[1:], ends[0], dim=dim)
    return _run(_both(forward, back, group, exchange), [local])


def join_tensors(
    locals_: Sequence[Local],
    parts: Sequence[TensorSpec],
    whole: TensorSpec,
    group: ProcessGroup | None = None,
    *,
    dim: int = 0,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    """Return this rank's part of the whole, from its local tensors of the parts of it.

    Collective: every rank of `group` calls. `locals_` has one tensor for each part, None (or an
    empty one) where this rank holds nothing. Gradients flow back to the parts.

    Raises:
        MeshTypeError: something is partial.
        MeshValueError: the parts do not make up the whole.
    """
    forward = plan_join(parts, whole, dim=dim)
    ends = [_gradient(t, is_source=False) for t in (whole, *parts)]
    back = plan_split(ends[0], ends[1:], dim=dim)
    return _run(_both(forward, back, group, exchange), locals_)[0]


def _both(
    forward: Plan, back: Plan, group: ProcessGroup | None, exchange: Exchange | None
) -> _Ways:
    return _Ways(
        forward=forward,
        backward=lambda: back,
        again=lambda: forward,
        group=group,
        exchange=exchange,
    )


def _gradient(tensor: TensorSpec, *, is_source: bool) -> TensorSpec:
    """How the gradient of a tensor lies."""
    kinds = set(tensor.partials.values())
    if not kinds:
        return tensor
    if not is_source or kinds != {"sum"}:
        raise MeshTypeError(
            f"gradients flow through partial sums of the source alone, got {tensor.partials}; "
            "use plan_reshard and execute without gradients"
        )
    return tensor.reduced()


def _run(ways: _Ways, given: Sequence[Local]) -> list[torch.Tensor]:
    check_running()
    check_kind(given, Sequence, "the local tensors must be a list, one for each part")
    sources = ways.forward.sources
    if len(given) != len(sources):
        raise MeshValueError(
            f"{len(given)} local tensors were given, and the plan has {len(sources)}"
        )
    for local in given:
        check_kind(local, Local, "what a rank holds must be a tensor or None")
    device, rank = device_of(given, ways.group), dist.get_rank()
    pairs = zip(given, sources, strict=True)
    anchors = [_anchor(local, tensor, device, rank) for local, tensor in pairs]
    return list(_Resharding.apply(ways, *anchors))


def _anchor(local: Local, tensor: TensorSpec, device: torch.device, rank: int) -> torch.Tensor:
    """What autograd follows: of a rank without data, which has no such tensor, an empty one."""
    if local is None or (tensor.mesh.position(rank) is None and not local.requires_grad):
        return torch.empty(
            (0,) if local is None else local.shape,  # one that is not empty is refused later
            dtype=tensor.dtype,
            device=device if local is None else local.device,
            requires_grad=tensor.dtype.is_floating_point or tensor.dtype.is_complex,
        )
    return local


class _Resharding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ways: _Ways, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ways = ways
        ctx.shapes = [tensor.shape for tensor in given]
        return _carry(ways, ways.forward, given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        found = _Resharding.apply(ctx.ways.turned(), *gradients)
        return None, *(g.view(shape) for g, shape in zip(found, ctx.shapes, strict=True))


def _carry(ways: _Ways, plan: Plan, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found = execute(plan, given[0] if plan.single else given, ways.group, ways.exchange)
    results = [found] if plan.single else found
    return tuple(
        torch.empty(0, dtype=tensor.dtype, device=given[0].device) if result is None else result
        for result, tensor in zip(results, plan.targets, strict=True)
    )
