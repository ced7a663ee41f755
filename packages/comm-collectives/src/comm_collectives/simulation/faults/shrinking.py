"""From a run that fails to a short one that fails too: fewer faults, calls and ranks.

    start = Scenario(num_ranks=37, calls=(0, 1, 2, 3), faults=schedule)
    small = shrink(start, fails=lambda s: simulate([program[i] for i in s.calls], s.num_ranks,
                                                   faults=s.faults, seed=7).hung)

Delta debugging: every smaller scenario is tried, the boldest first, until none fails any more.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from comm_collectives.errors import CommValueError
from comm_collectives.simulation.faults.schedule import Delay, Fault, FaultSchedule, Kill, Truncate

_LEAST_RANKS = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run as what can be left out of it.

    Attributes:
        calls: which calls of the original program are made, by their places there. The faults
            count the calls of this shorter program.
    """

    num_ranks: int
    calls: tuple[int, ...]
    faults: FaultSchedule


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], *, max_tries: int = 500
) -> Scenario:
    """Return a scenario that fails and of which nothing can be left out. Pure but for `fails`.

    Args:
        scenario: one that fails.
        fails: runs a scenario, and says whether what is looked for still happens.
        max_tries: how often to run at most; the smallest one found until then is returned.

    Raises:
        ValueError: the scenario does not fail.
    """
    if not fails(scenario):
        raise CommValueError(f"{scenario} does not fail, so there is nothing to shrink")
    tries = 0
    candidates = _smaller(scenario)
    while tries < max_tries:
        candidate = next(candidates, None)
        if candidate is None:
            break
        tries += 1
        if fails(candidate):
            scenario, candidates = candidate, _smaller(candidate)
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    yield from _fewer_faults(scenario)
    yield from _fewer_ranks(scenario)
    yield from _fewer_calls(scenario)
    yield from _plainer_faults(scenario)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults.faults
    if len(faults) > 2:
        half = len(faults) // 2
        for some in (faults[:half], faults[half:]):
            yield dataclasses.replace(scenario, faults=FaultSchedule(some))
    for fault in faults:
        yield dataclasses.replace(scenario, faults=scenario.faults.without(fault))


def _fewer_ranks(scenario: Scenario) -> Iterator[Scenario]:
    """As few as the faulty ones and one more, then twice as many, and one less at last."""
    faulty = sorted({rank for fault in scenario.faults.faults for rank in _ranks_of(fault)})
    names = {rank: i for i, rank in enumerate(faulty)}
    size = max(_LEAST_RANKS, len(faulty))
    while size < scenario.num_ranks:
        yield dataclasses.replace(scenario, num_ranks=size, faults=_renamed(scenario.faults, names))
        # The order of the ranks may matter, so the same with the last names.
        last = {rank: size - len(faulty) + i for rank, i in names.items()}
        yield dataclasses.replace(scenario, num_ranks=size, faults=_renamed(scenario.faults, last))
        size = size + 1 if size < 4 else min(2 * size, max(size + 1, scenario.num_ranks - 1))


def _fewer_calls(scenario: Scenario) -> Iterator[Scenario]:
    for at in range(len(scenario.calls)):
        if len(scenario.calls) > 1:
            kept = [fault for fault in scenario.faults.faults if fault.call != at]
            moved = [dataclasses.replace(f, call=f.call - (f.call > at)) for f in kept]
            yield dataclasses.replace(
                scenario,
                calls=scenario.calls[:at] + scenario.calls[at + 1 :],
                faults=FaultSchedule(tuple(moved)),
            )


def _plainer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults.faults
    for at, fault in enumerate(faults):
        for plainer in _plainer(fault):
            changed = FaultSchedule((*faults[:at], plainer, *faults[at + 1 :]))
            yield dataclasses.replace(scenario, faults=changed)


def _plainer(fault: Fault) -> Iterator[Fault]:
    if isinstance(fault, Delay | Kill | Truncate):
        for operation in range(isinstance(fault, Truncate), fault.operation):
            yield dataclasses.replace(fault, operation=operation)
    if isinstance(fault, Kill):
        for reached in {0, fault.reached // 2} - {fault.reached}:
            yield dataclasses.replace(fault, reached=reached)


def _ranks_of(fault: Fault) -> tuple[int, ...]:
    return (fault.rank, fault.peer) if isinstance(fault, Truncate) else (fault.rank,)


def _renamed(faults: FaultSchedule, names: dict[int, int]) -> FaultSchedule:
    renamed: list[Fault] = []
    for fault in faults.faults:
        changed = dataclasses.replace(fault, rank=names[fault.rank])
        if isinstance(changed, Truncate):
            changed = dataclasses.replace(changed, peer=names[changed.peer])
        renamed.append(changed)
    return FaultSchedule(tuple(renamed))
