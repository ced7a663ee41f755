"""The list of checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mesh_spmd.trials.case import At, Case
from mesh_spmd.trials.dtensors import check_dtensor, no_dtensor
from mesh_spmd.trials.grouping import check_groups, not_grouped
from mesh_spmd.trials.making import check_creation, check_shapes, not_inferred
from mesh_spmd.trials.moving import (
    check_bytes,
    check_gradients,
    check_random,
    check_reshard,
    not_floating,
)
from mesh_spmd.trials.parting import check_parts, not_parted


def _always(case: Case) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what every rank does, a line for each difference, and why a case leaves it out."""

    name: str
    run: Callable[[At], list[str]]
    left_out: Callable[[Case], str] = _always


CHECKS = (
    Check(name="groups", run=check_groups, left_out=not_grouped),
    Check(name="creation", run=check_creation),
    Check(name="reshard", run=check_reshard),
    Check(name="bytes", run=check_bytes),
    Check(name="gradients", run=check_gradients, left_out=not_floating),
    Check(name="random", run=check_random, left_out=not_floating),
    Check(name="shapes", run=check_shapes, left_out=not_inferred),
    Check(name="parts", run=check_parts, left_out=not_parted),
    Check(name="dtensor", run=check_dtensor, left_out=no_dtensor),
)


def run_checks(case: Case, rank: int, device: torch.device) -> Iterator[list[str]]:
    """Run on a rank what the case does not leave out, and give the differences of each check."""
    at = At(case=case, rank=rank, device=device)
    for check in CHECKS:
        if not check.left_out(case):
            yield check.run(at)
