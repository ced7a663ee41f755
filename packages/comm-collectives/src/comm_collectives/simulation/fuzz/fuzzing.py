"""Random programs under random faults: all right everywhere, or the same error everywhere.

Each trial draws a number of ranks, a program of a few collectives, where the ranks meet, and a
schedule of faults, all from one seed, runs it on simulated ranks and judges the end:

- every surviving rank has finished, with the bits that an oracle without communication has, or
- every surviving rank has raised the same class of CommError (any, if there were transfers);
- nobody waits for ever, and late ranks and ranks without data alone are no reason to fail.

Every program ends with a call that no fault strikes: whether the very last message of a program has
arrived is nothing that all ranks can ever agree on (the two generals).

    report = fuzz(100, seed=1)
    print(report)            # violations are shrunk to short reproducers
"""

import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch

from comm_collectives.call.agreement import AgreementPolicy
from comm_collectives.call.groups import check_integer
from comm_collectives.errors import CommValueError, LostGradientWarning
from comm_collectives.simulation import Threads
from comm_collectives.simulation.fuzz.trial import Trial, Violation

_COLLECTS = 20  # trials between two collections


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzReport:
    """How the trials ended: `endings` counts "finished" and the names of errors."""

    seed: int
    num_schedules: int
    num_ranks: int
    elapsed_s: float
    endings: Counter[str] = field(default_factory=Counter)
    violations: tuple[Violation, ...] = ()

    @property
    def num_right(self) -> int:
        """Trials that ended as they may."""
        return self.num_schedules - len(self.violations)

    def __str__(self) -> str:
        endings = ", ".join(f"{count} {name}" for name, count in self.endings.most_common())
        lines = [
            f"{self.num_right} of {self.num_schedules} schedules from seed {self.seed} over "
            f"{self.num_ranks} ranks in all are right ({self.elapsed_s:.1f} s): {endings}"
        ]
        return "\n".join([*lines, *map(str, self.violations)])


def fuzz(
    num_schedules: int,
    *,
    seed: int,
    ranks: tuple[int, int] = (8, 64),
    agreement: AgreementPolicy | None = None,
    max_violations: int = 3,
) -> FuzzReport:
    """Run as many trials, with the seeds seed, seed + 1, ...; not collective.

    Args:
        num_schedules: how many.
        seed: the first one. The same seed gives the same trial.
        ranks: least and most ranks of a trial; drawn evenly on a logarithmic scale.
        agreement: when ranks compare their calls; None draws it, from always to each 64th.
        max_violations: stop after so many, each of which is shrunk.

    Raises:
        ValueError: fewer than one trial, or fewer than two ranks.
    """
    check_integer(num_schedules, "num_schedules")
    check_integer(seed, "seed")
    if num_schedules < 1 or not 2 <= ranks[0] <= ranks[1]:
        raise CommValueError(
            f"num_schedules={num_schedules}, ranks={ranks}; give at least one trial, and at least "
            "two ranks, the least first"
        )
    started = time.monotonic()
    endings: Counter[str] = Counter()
    violations: list[Violation] = []
    done = num_ranks = 0
    with _undisturbed() as threads:
        for trial_seed in range(seed, seed + num_schedules):
            trial = Trial(trial_seed, ranks, agreement, threads)
            ending, reason = trial.run(trial.scenario)
            endings[ending] += 1
            done += 1
            if done % _COLLECTS == 0:
                gc.collect()  # between trials little is alive to look at
            num_ranks += trial.scenario.num_ranks
            if reason is not None:
                violations.append(trial.shrunk(reason))
                if len(violations) == max_violations:
                    break
    return FuzzReport(
        seed=seed,
        num_schedules=done,
        num_ranks=num_ranks,
        elapsed_s=time.monotonic() - started,
        endings=endings,
        violations=tuple(violations),
    )


@contextmanager
def _undisturbed() -> Iterator[Threads]:
    """Keep away what costs more than the trials, and give the threads for them."""
    threads, torch_threads = Threads(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny here
    gc.collect()
    gc.freeze()  # each full collection would look at all that torch has loaded
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Some cases leave results unused on purpose.
            warnings.simplefilter("ignore", LostGradientWarning)
            yield threads
    finally:
        gc.unfreeze()
        if was_collecting:
            gc.enable()
        torch.set_num_threads(torch_threads)
        threads.close()
