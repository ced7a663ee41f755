"""One trial of the fuzzer: what a seed stands for, and whether its end is a right one.

trial = Trial(seed=7, ranks=(8, 64), agreement=None, threads=Threads())
ending, reason = trial.run(trial.scenario)       # "finished" or an error's name; None if right
"""

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import final

import torch

from comm_collectives.call.agreement import AgreementPolicy
from comm_collectives.call.signature import call_site
from comm_collectives.collectives import broadcast
from comm_collectives.errors import CommError
from comm_collectives.simulation import (
    Outcome,
    Setting,
    SimRank,
    SimulationResult,
    SimulationStuckError,
    Step,
    Threads,
    run_in,
)
from comm_collectives.simulation.faults import (
    Delay,
    FaultSchedule,
    Reorder,
    Scenario,
    ZeroTokens,
    shrink,
)
from comm_collectives.simulation.fuzz.cases import KINDS, Case, Draw, Results
from comm_collectives.simulation.fuzz.disagreements import Disagreement, Mishap
from comm_collectives.simulation.fuzz.experts import Experts
from comm_collectives.simulation.fuzz.transfers import Transfers

_CALLS = (1, 3)  # each of up to four collectives
_WITH_EXPERTS, _WITH_TRANSFERS, _WITH_DISAGREEMENT = 0.3, 0.15, 0.2
_LIMIT_S = 2.2  # above all that the late ranks of one schedule can add up to
_EVERY = (1, 3, 64)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A trial that ended as it must not, shrunk. `fuzz(1, seed=seed)` repeats the trial."""

    seed: int
    reason: str
    names: tuple[str, ...]
    scenario: Scenario
    setting: Setting

    def __str__(self) -> str:
        setting = self.setting
        return (
            f"seed {self.seed}: {self.reason}\n  calls: {'; '.join(self.names)}\n"
            f"  {self.scenario}\n"
            f"  shared_memory={setting.shared_memory}, {setting.agreement}"
        )


@final
class Trial:
    """Program, setting and faults, all drawn from one seed."""

    def __init__(
        self, seed: int, ranks: tuple[int, int], agreement: AgreementPolicy | None, threads: Threads
    ) -> None:
        chance = Random(seed)
        low, high = math.log(ranks[0]), math.log(ranks[1] + 1)
        num_ranks = min(int(math.exp(chance.uniform(low, high))), ranks[1])
        self.seed, self._ranks = seed, ranks
        self._threads = threads
        self._kinds = [chance.choice(KINDS) for _ in range(chance.randint(*_CALLS))]
        if chance.random() < _WITH_EXPERTS:  # not more, since they cost as much as all the rest
            self._kinds[chance.randrange(len(self._kinds))] = Experts
        if chance.random() < _WITH_TRANSFERS:
            self._kinds[chance.randrange(len(self._kinds))] = Transfers
        if chance.random() < _WITH_DISAGREEMENT:
            self._kinds[chance.randrange(len(self._kinds))] = Disagreement
        faults = FaultSchedule.random(chance.getrandbits(32), num_ranks, len(self._kinds))
        self.scenario = Scenario(
            num_ranks=num_ranks, calls=tuple(range(len(self._kinds))), faults=faults
        )
        drawn = AgreementPolicy(every=chance.choice(_EVERY))
        self._setting = Setting(
            num_ranks=num_ranks,
            seed=seed,
            shared_memory=chance.random() < 0.5,
            limit_s=_LIMIT_S,
            agreement=drawn if agreement is None else agreement,
        )

    def run(self, scenario: Scenario) -> tuple[str, str | None]:
        """Run a scenario of this trial; return how it ended, and what is wrong with that."""
        # No fault strikes the last call, so none comes behind it either.
        at_end = Reorder, len(scenario.calls) - 1
        struck = [f for f in scenario.faults.faults if (type(f), f.call) != at_end]
        scenario = dataclasses.replace(scenario, faults=FaultSchedule(tuple(struck)))
        cases = self._cases(scenario)
        program: list[Step] = [
            _step(call, case) for call, case in zip(scenario.calls, cases, strict=True)
        ]
        setting = dataclasses.replace(
            self._setting, num_ranks=scenario.num_ranks, faults=scenario.faults
        )
        try:
            result = run_in(setting, [*program, _close], self._threads)
        except SimulationStuckError as error:
            raise self._saved(scenario, error) from error
        for outcome in result.outcomes:
            _forget_frames(outcome.error)
        return judge(result, cases, scenario.faults)

    def shrunk(self, reason: str) -> Violation:
        """Shrink what went wrong here."""
        small = shrink(self.scenario, lambda scenario: self.run(scenario)[1] is not None)
        return Violation(
            seed=self.seed,
            reason=self.run(small)[1] or reason,
            names=tuple(case.name for case in self._cases(small)),
            scenario=small,
            setting=self._setting,
        )

    def _saved(self, scenario: Scenario, error: SimulationStuckError) -> SimulationStuckError:
        """Keep what a stuck trial was and where its ranks stood, since it may not happen again."""
        replay = f"fuzz(1, seed={self.seed}, ranks={self._ranks})"
        path = Path(tempfile.gettempdir()) / f"comm-collectives-stuck-{self.seed}.txt"
        text = f"{replay} was stuck: {scenario}; saved in {path}\n{error}"
        path.write_text(text + "\n", encoding="utf-8")
        return SimulationStuckError(text)

    def _cases(self, scenario: Scenario) -> list[Case]:
        cases = []
        for at, call in enumerate(scenario.calls):
            faults = [f for f in scenario.faults.faults if isinstance(f, ZeroTokens)]
            empty = {fault.rank for fault in faults if fault.call == at}
            draw = Draw(
                seed=self.seed * len(KINDS) + call,
                size=scenario.num_ranks,
                has_tokens=[rank not in empty for rank in range(scenario.num_ranks)],
                is_calm=_is_harmless(scenario.faults),
            )
            cases.append(self._kinds[call](draw))
        return cases


def judge(
    result: SimulationResult, cases: Sequence[Case], faults: FaultSchedule
) -> tuple[str, str | None]:
    """Return how a run ended, and what is wrong with that if anything is."""
    if result.hung:
        return "hung", "every rank waits, and for nothing that could happen"
    # A rank whose program has had an error of its own is no measure of what the others get.
    survivors = {
        rank: outcome
        for rank, outcome in enumerate(result.outcomes)
        if outcome.survived and not isinstance(outcome.error, Mishap)
    }
    errors = {rank: o.error for rank, o in survivors.items() if o.error is not None}
    for rank, error in errors.items():
        if not isinstance(error, CommError):
            return "other error", f"rank {rank} raised {type(error).__name__}: {error}"
    if not errors:
        return "finished", _first_difference(survivors, cases)
    kinds = sorted({type(error).__name__ for error in errors.values()})
    ending = " and ".join(kinds)
    rank, error = min(errors.items())
    said = f"rank {rank}: {type(error).__name__}: {error}"
    if len(errors) < len(survivors):
        return ending, f"rank {min(survivors.keys() - errors.keys())} finished, but {said}"
    if len(kinds) > 1 and not any(isinstance(case, Transfers) for case in cases):
        other = next(o for o in errors.values() if type(o) is not type(error))
        return ending, f"{said}, but {type(other).__name__}: {other}"
    if _is_harmless(faults):
        return ending, f"nothing was wrong, but {said}"
    return ending, None


def _first_difference(survivors: dict[int, Outcome], cases: Sequence[Case]) -> str | None:
    """Compare results with the oracle, bit for bit."""
    for call, case in enumerate(cases):
        if all(outcome.values[call] is None for outcome in survivors.values()):
            continue  # left out by all of them
        expected = case.expected()
        for rank, outcome in survivors.items():
            got: Results | None = outcome.values[call]  # type: ignore[assignment]
            if got is None or not _are_equal(got, expected[rank]):
                return f"rank {rank} got {got} of {case.name}, but {expected[rank]} is right"
    return None


def _are_equal(got: Results, expected: Results) -> bool:
    return len(got) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True)
    )


def _forget_frames(error: BaseException | None) -> None:
    """Let go of where an error came from: ranks hold each other there, until they are collected."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _step(call: int, case: Case) -> Step:
    def step(rank: SimRank) -> Results:
        with call_site(f"call {call}"):
            return case.call(rank)

    return step


def _close(rank: SimRank) -> torch.Tensor:
    """The call with which every program ends."""
    with call_site("the last call"):
        return broadcast(torch.ones(1) if rank.rank == 0 else None, src=0, group=rank.group)


def _is_harmless(faults: FaultSchedule) -> bool:
    """Whether ranks are only late, and together not too late, or without data."""
    late_s = sum(fault.delay_s for fault in faults.faults if isinstance(fault, Delay))
    kinds = (Delay, ZeroTokens)
    return late_s < _LIMIT_S and all(isinstance(fault, kinds) for fault in faults.faults)
