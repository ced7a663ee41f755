"""What came of a cell or a mistake on one rank, and on all ranks together.

A cell ends on each rank in a result, which is compared, or in an exception.

    result = run_case(lambda: run_ours(case))      # inside each rank, with a process group
    verdict, detail = judge([result_of_rank_0, result_of_rank_1])
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SOON_S = 1.0  # within which a refusal has to be there on every rank


class Verdict(StrEnum):
    """How a cell or a mistake ended on all ranks together."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "silently wrong"
    FAILED = "failed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"


# What torch and pickle are known to raise, and what a mistake of this package could.
_EXCEPTIONS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    OSError,
    ImportError,
    Warning,
    pickle.PickleError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What came of a cell on one rank.

    Attributes:
        verdict: RIGHT, WRONG, or FAILED if it raised, until all ranks are looked at together; or
            ABORTED or TIMED_OUT if the rank did not come back.
        detail: what is wrong, or the text of the exception.
        error: the class of the exception.
        elapsed_s: from the start of the cell.
    """

    verdict: Verdict
    detail: str = ""
    error: str = ""
    elapsed_s: float = 0.0


def run_case(run: Callable[[], str]) -> CaseResult:
    """Run a cell on this rank; `run` returns what is wrong, or ""."""
    started = time.monotonic()
    try:
        problem = run()
    except _EXCEPTIONS as error:
        return CaseResult(
            verdict=Verdict.FAILED,
            detail=str(error),
            error=type(error).__name__,
            elapsed_s=time.monotonic() - started,
        )
    return CaseResult(
        verdict=Verdict.WRONG if problem else Verdict.RIGHT,
        detail=problem,
        elapsed_s=time.monotonic() - started,
    )


def judge(results: Sequence[CaseResult]) -> tuple[Verdict, str]:
    """Return what came of a cell on all ranks together, and the detail that says most."""
    for verdict in (Verdict.ABORTED, Verdict.TIMED_OUT):
        for rank, result in enumerate(results):
            if result.verdict == verdict or (verdict == Verdict.TIMED_OUT and is_nameless(result)):
                return verdict, on_rank(rank, result)
    bad = [(rank, result) for rank, result in enumerate(results) if result.verdict != Verdict.RIGHT]
    if not bad:
        return Verdict.RIGHT, ""
    classes = {result.error for result in results}
    if classes == {""}:
        return Verdict.WRONG, on_rank(*bad[0])
    latest = max(result.elapsed_s for result in results)
    if len(classes) > 1:
        return Verdict.FAILED, "not alike on every rank: " + "; ".join(
            on_rank(*each) for each in bad
        )
    if latest > SOON_S:
        return Verdict.FAILED, f"after {latest:.1f} s: {on_rank(*bad[0])}"
    return Verdict.REFUSED, on_rank(*bad[0])


def is_nameless(result: CaseResult) -> bool:
    """Whether a rank ended in a time limit whose text names no rank."""
    text = result.detail.lower()
    return bool(result.error) and ("timed out" in text or "timeout" in text) and "rank" not in text


def on_rank(rank: int, result: CaseResult) -> str:
    """Return what came of a cell on a rank, in one line."""
    error = f"{result.error}: " if result.error else ""
    lines = result.detail.splitlines()
    return f"rank {rank}: {error}{lines[0] if lines else ''}"
