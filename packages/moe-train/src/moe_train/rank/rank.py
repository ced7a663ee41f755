"""One rank of a job: what it runs, what it is given, and what it leaves for the launcher.

The launcher writes `RUN_DIR/job.json` with the module to run; the rank writes `rank-<n>.pid` once
it is ready for signals, then `rank-<n>.done`, or `rank-<n>.error.json` if its job raises. The
module defines one function, `run(argv: list[str], context: RankContext) -> None`.

    run_rank("moe_train.jobs.rank_job", ["config.toml", ""], context)  # under torchrun, no RUN_DIR
"""

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from moe_train.errors import MoeTrainError
from unified_ckpt.signals import SignalWatch


@dataclass(slots=True)
class RankContext:
    """What a rank's job is given, and what it tells: `step` is the number of finished steps.

    Attributes:
        started_s: when the job began, on the monotonic clock; of a command, when that was given.
        out_of_time: whether the job has saved and ended for the sake of its own time limit.
        is_finished: whether it came to its end, whatever else it was asked for then.
    """

    signals: SignalWatch = field(default_factory=lambda: SignalWatch(()))
    step: int = 0
    out_of_time: bool = False
    is_finished: bool = False
    started_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since the job began on this rank."""
        return time.monotonic() - self.started_s

    @property
    def outcome(self) -> str:
        """What a rank says of a job that has ended without an error."""
        return "finished" if self.is_finished else "out of time" if self.out_of_time else ""

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked this process to save and end."""
        return bool(self.signals.seen)


def watch_stop_signals() -> RankContext:
    """A context that notes SIGINT and SIGTERM, which then never end this process by themselves.

    A second Ctrl-C is for the launcher to act on: it kills the ranks.
    """
    return RankContext(SignalWatch((signal.SIGINT, signal.SIGTERM), repeat_s=math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What a failing rank leaves for the launcher.

    Attributes:
        rank: its number in the job.
        step: finished steps when it failed.
        monotonic_s: when, on the machine's monotonic clock, which all processes share.
        text: the traceback, or the summary of an error that is a message for people.
        summary: type and message of the exception.
    """

    rank: int
    step: int
    monotonic_s: float
    text: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a launch runs, who launched it, and when."""

    module: str
    argv: list[str]
    launcher_pid: int
    started_s: float = field(default_factory=time.monotonic)


def rank_file(run_dir: Path, rank: int, kind: str) -> Path:
    """The file in which a rank says that it is ready for signals (`pid`), that its job ran to its
    end (`done`, with `RankContext.outcome`), or why it failed (`error.json`).
    """
    return run_dir / f"rank-{rank}.{kind}"


class RankJobError(MoeTrainError):
    """A rank's job raised; `error` says where and why."""

    def __init__(self, error: RankError) -> None:
        super().__init__(f"rank {error.rank}, step {error.step}: {error.summary}")
        self.error = error


def run_rank(module: str, argv: Sequence[str], context: RankContext) -> None:
    """Import `module` and call its `run`.

    Raises:
        RankJobError: whatever exception the job raised, with rank and step.
    """
    try:
        import_module(module).run(list(argv), context)
    # Whatever a job raises must reach the person who started it, with rank and step.
    except Exception as error:
        summary = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        is_told = isinstance(error, MoeTrainError)  # a message for people, no defect to look into
        raised = RankError(
            rank=rank_number(),
            step=context.step,
            monotonic_s=time.monotonic(),
            text=summary if is_told else traceback.format_exc(),
            summary=summary,
        )
        raise RankJobError(raised) from error


def leave(exit_code: int) -> None:
    """End this process; after a failure at once, for its threads may wait for lost peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)
    sys.exit(0)


def rank_number() -> int:
    """This process's rank, from the environment; 0 outside of a job."""
    return int(os.environ.get("RANK", "0"))
