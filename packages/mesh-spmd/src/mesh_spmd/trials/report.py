"""What checks on local ranks came to.

report = check_on_ranks(Case(source=experts, target=wider), timeout_s=60.0)
report.right    # whether every check ran on every rank and found no difference
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

from mesh_spmd._torch_private import load_redistribute
from mesh_spmd.trials.case import Case
from mesh_spmd.trials.checks import CHECKS, run_checks
from mesh_spmd.trials.dtensors import no_dtensor
from mesh_spmd.trials.local_ranks import run_on_ranks


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check: on how many ranks it ended, what they found, and why it was left out."""

    name: str
    num_ranks: int
    problems: tuple[str, ...] = ()
    left_out: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcomes of all checks, and how ranks were lost on the way."""

    outcomes: tuple[Outcome, ...]
    lost: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether every rank ended, and none found a difference."""
        return not self.lost and not any(outcome.problems for outcome in self.outcomes)


def check_on_ranks(case: Case, *, timeout_s: float) -> Report:
    """Start ranks, run all checks that the case does not leave out, and end the ranks.

    Args:
        case: what is checked.
        timeout_s: the longest that a rank may take to start, or for one check.

    Raises:
        MeshStateError: there is no device of the kind.
    """
    if case.device_type == "cpu" and not no_dtensor(case):
        load_redistribute()
    found = run_on_ranks(
        partial(run_checks, case),
        case.world_size,
        device_type=case.device_type,
        timeout_s=timeout_s,
    )
    outcomes, number, names = [], 0, []
    for check in CHECKS:
        reason = check.left_out(case)
        if reason:
            outcomes.append(Outcome(name=check.name, num_ranks=0, left_out=reason))
            continue
        answers = [given[number] for given in found.answers if len(given) > number]
        problems = tuple(line for lines in answers for line in lines)
        outcomes.append(Outcome(name=check.name, num_ranks=len(answers), problems=problems))
        names.append(check.name)
        number += 1
    lost = tuple(
        f"rank {rank} {how} {_when(len(found.answers[rank]), names, started=rank in found.started)}"
        for rank, how in found.lost.items()
    )
    return Report(outcomes=tuple(outcomes), lost=lost)


def _when(number: int, names: list[str], *, started: bool) -> str:
    if not started:
        return "at its start"
    return f"in the check {names[number]}" if number < len(names) else "after the last check"
