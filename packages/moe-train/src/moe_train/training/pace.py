"""How long steps take, and whether the time that a job has leaves room for another one.

pace = Pace(limit_s=3600.0)
with pace.step():
    ...
with pace.validation():
    ...
pace.is_last(age_s=3500.0, save_s=40.0)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Pace:
    """Of one rank.

    Attributes:
        limit_s: how old the job may become; infinite for any age.
        longest_s: what the longest step has taken.
        validation_s: likewise of a validation, which follows some steps.
    """

    limit_s: float
    longest_s: float = 0.0
    validation_s: float = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step."""
        started = time.monotonic()
        yield
        self.longest_s = max(self.longest_s, time.monotonic() - started)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Measure a validation."""
        started = time.monotonic()
        yield
        self.validation_s = max(self.validation_s, time.monotonic() - started)

    def is_last(self, age_s: float, save_s: float) -> bool:
        """Whether the job must save after the step that begins now: one more would end too late.

        Args:
            age_s: of the job.
            save_s: what a save takes.
        """
        return age_s + 2 * self.longest_s + self.validation_s + save_s >= self.limit_s
