"""One global tensor and local tensors of sub-meshes: experts that live on stages or groups.

Each part lies on a mesh of its own, in its own layout; the parts follow each other along one dim of
the whole. Ranks that hold neither take part in the exchange without data.

    plan_split(whole, [stage_0, stage_1])     # 64 experts of the whole mesh -> 32 on each stage
    plan_join([stage_0, stage_1], whole)      # and back
"""

from collections.abc import Sequence
from itertools import accumulate

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.moves import Link
from mesh_spmd.reshard.plan import Plan, checked_tensors
from mesh_spmd.reshard.steps import make_step


def plan_split(whole: TensorSpec, parts: Sequence[TensorSpec], *, dim: int = 0) -> Plan:
    """Return the plan from one tensor to parts of it, which follow each other along `dim`.

    Raises:
        MeshTypeError: something is no TensorSpec.
        MeshValueError: the parts do not make up the whole.
    """
    links = [
        Link(source=0, target=number, shift=shift)
        for number, shift in enumerate(_shifts(whole, checked_tensors(parts, "parts"), dim))
    ]
    return Plan(steps=(make_step([whole], list(parts), links),), single=False)


def plan_join(parts: Sequence[TensorSpec], whole: TensorSpec, *, dim: int = 0) -> Plan:
    """Return the plan from parts, which follow each other along `dim`, to the whole tensor.

    Raises:
        MeshTypeError: something is no TensorSpec, or a part has partial values.
        MeshValueError: the parts do not make up the whole, or the values of one are partial.
    """
    for number, part in enumerate(checked_tensors(parts, "parts")):
        if part.partials:
            raise MeshValueError(
                f"part {number} has partial values over {', '.join(part.partials)}; reduce it "
                "with plan_reshard first"
            )
    links = [
        Link(source=number, target=0, shift=shift, inner_target=False)
        for number, shift in enumerate(_shifts(whole, list(parts), dim))
    ]
    return Plan(steps=(make_step(list(parts), [whole], links),), single=False)


def _shifts(whole: TensorSpec, parts: list[TensorSpec], dim: int) -> list[tuple[int, ...]]:
    """Where each part begins in the whole."""
    check_kind(whole, TensorSpec, "whole must be a TensorSpec")
    ndim = len(whole.shape)
    if not -ndim <= dim < ndim:
        raise MeshValueError(f"dim {dim} is out of range for a whole of shape {whole.shape}")
    at = dim % ndim
    for number, part in enumerate(parts):
        rest = (*whole.shape[:at], *whole.shape[at + 1 :])
        if (*part.shape[:at], *part.shape[at + 1 :]) != rest or len(part.shape) != ndim:
            raise MeshValueError(
                f"part {number} has shape {part.shape}; beside dim {at} it must be that of the "
                f"whole, {whole.shape}"
            )
        if part.dtype != whole.dtype:
            raise MeshValueError(f"part {number} is {part.dtype}, the whole is {whole.dtype}")
    lengths = [part.shape[at] for part in parts]
    if sum(lengths) != whole.shape[at]:
        raise MeshValueError(
            f"the parts have {lengths} along dim {at}, {sum(lengths)} together; the whole has "
            f"{whole.shape[at]}"
        )
    starts = list(accumulate(lengths, initial=0))[:-1]
    return [tuple(start if d == at else 0 for d in range(ndim)) for start in starts]
