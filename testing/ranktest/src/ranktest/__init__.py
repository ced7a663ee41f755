"""Run a function on N ranks, in tests: real forked processes over gloo, never a hang.

The ranks are forked, so that `fn` may be a closure and start-up costs milliseconds; each rank runs
on one thread because OpenMP's pool does not survive a fork. Keep the parent free of process groups.

    from ranktest import run_ranks

    def fn(rank: int, world_size: int) -> float:
        x = torch.ones(2) * rank
        dist.all_reduce(x)
        return x[0].item()

    assert run_ranks(fn, 4) == [6.0] * 4
"""

from ranktest.hosts import can_leave_shared_memory, leave_shared_memory
from ranktest.marks import mark, until_marked
from ranktest.output import unread_output
from ranktest.ranks import Outcome, RanksFailedError, collect_ranks, run_ranks
from ranktest.sockets import more_than_sockets_hold

__all__ = [
    "Outcome",
    "RanksFailedError",
    "can_leave_shared_memory",
    "collect_ranks",
    "leave_shared_memory",
    "mark",
    "more_than_sockets_hold",
    "run_ranks",
    "unread_output",
    "until_marked",
]
