"""What a cell of deliberate misuse has to end in, and whether it did, rank by rank.

One rank, the odd one, does something else than the others. What must follow: the same exception on
every rank, at once, whose text names the ranks, the call and its number, file and line, and the
argument that differs; and afterwards a group that works.
"""

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comm_collectives.checking.results import (
    SOON_S,
    CaseResult,
    Verdict,
    is_nameless,
    on_rank,
    run_case,
)
from comm_collectives.collectives import all_reduce
from comm_collectives.errors import LostGradientWarning

MISMATCH, REFUSAL, TYPE_REFUSAL = "MismatchError", "RefusedError", "RefusedTypeError"
TIMEOUT, PEER_FAILED = "CollectiveTimeoutError", "PeerFailedError"
_AFTER_S = 5.0
_NUMBERED = re.compile(r"(call|transfer) \d+")
_SITE = re.compile(r"\w+\.py:\d+")
_SIDES_OF = {MISMATCH: 2, REFUSAL: 1, TYPE_REFUSAL: 1}


@dataclass(frozen=True, slots=True)
class At:
    """A rank's place in a cell."""

    rank: int
    size: int

    @property
    def odd(self) -> bool:
        """Whether this is the rank that does something else: the last one."""
        return self.rank == self.size - 1

    @property
    def x(self) -> torch.Tensor:
        """3,000 ones, which is more than travels with a control exchange."""
        return torch.ones(3000)

    def pick(self, odd: Any, usual: Any) -> Any:
        """Return one thing on the odd rank and another on the others."""
        return odd if self.odd else usual

    @property
    def splits(self) -> list[int]:
        """Splits by which a rank sends all rows of `x` to rank 0."""
        return [3000] + [0] * (self.size - 1)


def everybody(at: At) -> bool:
    """Every rank raises."""
    return True


def the_odd_one(at: At) -> bool:
    """Only the rank whose mistake it is raises; the others go on."""
    return at.odd


def the_first(at: At) -> bool:
    """Only rank 0 raises, which has to do with the mistake of the odd one; the others go on."""
    return at.rank == 0


def the_others(at: At) -> bool:
    """All ranks raise but the odd one, which is not there."""
    return not at.odd


def nobody(at: At) -> bool:
    """Nothing is wrong: it only looks like a mistake, and `run` checks the result."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse:
    """A mistake.

    Attributes:
        name: unique.
        run: what a rank does; where it does not raise it returns what is wrong, or nothing.
        error: class of the exception.
        says: what its text must hold; `{odd}` stands for the odd rank.
        raised_by: on which ranks.
        within_s: after how long at most.
        goes_on: whether the group works afterwards.
        dies: whether the odd rank ends.
        sides: calls whose file and line the text must hold, if not as usual for the class.
        run_raw: the same with torch.distributed itself, where that is possible.
    """

    name: str
    run: Callable[[At], Any]
    error: str = MISMATCH
    says: tuple[str, ...] = ()
    raised_by: Callable[[At], bool] = everybody
    within_s: float = SOON_S
    goes_on: bool = True
    dies: bool = False
    sides: int | None = None
    run_raw: Callable[[At], Any] | None = None

    @property
    def raises(self) -> bool:
        """Whether any rank raises."""
        return any(self.raised_by(At(rank, 2)) for rank in range(2))


def run_misuse(misuse: Misuse, at: At) -> CaseResult:
    """Make the mistake on this rank; RIGHT if it ended here as it must. Collective."""
    with warnings.catch_warnings():
        # A gradient that a rank loses on purpose is no news here.
        warnings.simplefilter("ignore", LostGradientWarning)
        result = run_case(lambda: _text_of(misuse.run(at)))
        problem = _problem(misuse, at, result)
        if not problem and misuse.goes_on:
            problem = _problem_afterwards(at)
    if not problem:
        return CaseResult(verdict=Verdict.RIGHT, error=result.error, elapsed_s=result.elapsed_s)
    return CaseResult(
        verdict=Verdict.FAILED if result.error else Verdict.WRONG,
        detail=problem,
        error=result.error,
        elapsed_s=result.elapsed_s,
    )


def judge_misuse(results: Sequence[CaseResult], misuse: Misuse) -> tuple[Verdict, str]:
    """Return what came of a mistake on all ranks together; REFUSED (or RIGHT) is as it must be."""
    size = len(results)
    must_raise = [misuse.raised_by(At(rank, size)) for rank in range(size)]
    living = _living(results, misuse)
    if all(result.verdict == Verdict.RIGHT for _, result in living):
        return (Verdict.REFUSED if any(must_raise) else Verdict.RIGHT), ""
    for verdict in (Verdict.ABORTED, Verdict.TIMED_OUT):
        for rank, result in living:
            if result.verdict == verdict or (verdict == Verdict.TIMED_OUT and is_nameless(result)):
                return verdict, on_rank(rank, result)
    bad = [(rank, result) for rank, result in living if result.verdict != Verdict.RIGHT]
    is_silent = not any(result.error for _, result in living)
    return (Verdict.WRONG if is_silent else Verdict.FAILED), on_rank(*bad[0])


def run_raw_misuse(misuse: Misuse, at: At) -> CaseResult:
    """Make the same mistake with something that promises nothing: any exception will do."""
    run = misuse.run if misuse.run_raw is None else misuse.run_raw
    result = run_case(lambda: _text_of(run(at)))
    if result.error or result.verdict == Verdict.WRONG or not misuse.raised_by(at):
        return result
    return CaseResult(verdict=Verdict.WRONG, detail="not a word", elapsed_s=result.elapsed_s)


def judge_raw_misuse(results: Sequence[CaseResult], misuse: Misuse) -> tuple[Verdict, str]:
    """As `judge_misuse`; an exception of one class on all ranks that must raise is REFUSED."""
    size = len(results)
    living = _living(results, misuse)
    raising = [result for rank, result in living if misuse.raised_by(At(rank, size))]
    nameless = any(is_nameless(result) for _, result in living)
    lost = any(result.verdict in (Verdict.ABORTED, Verdict.TIMED_OUT) for _, result in living)
    classes = {result.error for result in raising}
    soon = all(result.elapsed_s <= misuse.within_s for result in raising)
    if raising and not (nameless or lost) and len(classes) == 1 and "" not in classes and soon:
        return Verdict.REFUSED, on_rank(*living[0])
    return judge_misuse(results, misuse)


def _living(results: Sequence[CaseResult], misuse: Misuse) -> list[tuple[int, CaseResult]]:
    size = len(results)
    return [(r, x) for r, x in enumerate(results) if not (misuse.dies and At(r, size).odd)]


def _text_of(returned: Any) -> str:
    return returned if isinstance(returned, str) else ""


def _problem(misuse: Misuse, at: At, result: CaseResult) -> str:
    if not misuse.raised_by(at):
        return f"{result.error}: {result.detail}" if result.error else result.detail
    if not result.error:
        return result.detail or "not a word"
    if result.error != misuse.error:
        return f"it has to be a {misuse.error}: {result.detail}"
    if result.elapsed_s > misuse.within_s:
        return f"only after {result.elapsed_s:.1f} s: {result.detail}"
    missing = _missing(misuse, at, result.detail)
    return f"the text does not say {', '.join(missing)}: {result.detail}" if missing else ""


def _missing(misuse: Misuse, at: At, text: str) -> list[str]:
    """Return what the text of an exception fails to say."""
    words = [word.format(odd=f"rank {at.size - 1}") for word in misuse.says]
    missing = [repr(word) for word in words if word not in text]
    sides = _SIDES_OF.get(misuse.error, 0) if misuse.sides is None else misuse.sides
    if len(_SITE.findall(text)) < sides:
        missing.append(f"file and line of {sides} calls" if sides > 1 else "file and line")
    if misuse.error in (*_SIDES_OF, TIMEOUT, PEER_FAILED):
        if _NUMBERED.search(text) is None:
            missing.append("the number of the call")
        if f"rank {at.rank}: " not in text:
            missing.append("this rank")
    return missing


def _problem_afterwards(at: At) -> str:
    started = time.monotonic()
    try:
        total = all_reduce(torch.tensor([at.rank + 1]), timeout_s=_AFTER_S)
    except (RuntimeError, ValueError) as error:
        elapsed_s = time.monotonic() - started
        return f"the group does not work afterwards ({elapsed_s:.1f} s): {error}"
    if int(total) != at.size * (at.size + 1) // 2:
        return f"the group adds up to {int(total)} afterwards"
    return ""
