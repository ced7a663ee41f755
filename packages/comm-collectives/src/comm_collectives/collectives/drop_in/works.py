"""Calls in torch's terms: its `Work`, its ops, and ranks that are no members.

work = run_call("all_reduce", None, run, outputs=[x], async_op=True)
work.wait(); work.get_future().then(...)
"""

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives.base import is_dense
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import Caught, Handle, launch
from comm_collectives.collectives.drop_in.in_place import overlap
from comm_collectives.errors import CommError

_OP_OF = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


@final
class CallWork(dist.Work):
    """A call under way. `source` says, in the end, who sent what was received."""

    def __init__(
        self,
        handle: Handle[None],
        results: Sequence[Any],
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__()
        self._handle, self._results, self._source = handle, list(results), source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the results are written; zero waits for as long as the call may take.

        Raises:
            CommError: what the call raised, or `timeout` passed and the call goes on.
        """
        self._handle.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._handle.is_done()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what the call raised, None if it did not end or ended well."""
        if self.is_completed():
            with Caught(Exception) as caught:
                self._handle.wait()
            return caught.error  # type: ignore[return-value]
        return None

    def get_future(self) -> "torch.futures.Future[list[Any]]":
        """Return a future of the tensors that the call writes, or of lists of them."""
        parts = [part if isinstance(part, list | tuple) else [part] for part in self._results]
        devices = {x.device for x in chain(*parts) if x.device.type != "cpu"}
        future: torch.futures.Future[list[Any]] = torch.futures.Future(devices=list(devices))

        def end() -> None:
            with Caught() as caught:
                self._handle.wait()
            error = caught.error
            if error is None:
                future.set_result(self._results)
            else:  # torch takes no other kinds
                wrapped = error if isinstance(error, Exception) else CommError(repr(error))
                future.set_exception(wrapped)  # type: ignore[arg-type]

        self._handle.when_done(end)
        return future

    def result(self) -> list[Any]:
        """Return the tensors that the call writes."""
        return self._results

    def source_rank(self) -> int:
        """Return who sent what was received, as a rank of the group."""
        return self._source()

    _source_rank = source_rank


def run_call(
    name: str,
    group: Group | None,
    run: Callable[[GroupState], None],
    *,
    outputs: Any,
    inputs: Any = (),
    async_op: bool = False,
    results: Sequence[Any] | None = None,
) -> CallWork | None:
    """Run a call now, or return its Work at once. A rank that is no member is warned, as by torch.

    Inputs are watched, unless the call itself writes into their memory. What is no list of tensors
    the call itself refuses. The Work's results are the outputs, if no others are given.
    """
    if is_outside(name, group):
        return None
    state = group_state(group)
    written = _tensors_of(outputs)
    usable, given = list(filter(is_dense, written)), list(filter(is_dense, _tensors_of(inputs)))
    is_queued = async_op or state.worker is not None  # it may be, behind other calls
    # Empty ones keep the memory alive, and do not see it change.
    kept = [x.data.as_strided((0,), (1,)) for x in usable if is_queued]
    for x in given if is_queued else ():
        is_written = any(overlap(x, output) for output in usable)
        kept.append(x.data.as_strided((0,), (1,)) if is_written else x)
    handle = launch(state, name, lambda: run(state), inputs=kept, async_op=async_op)
    return CallWork(handle, written if results is None else results) if async_op else None


def _tensors_of(listed: Any) -> list[torch.Tensor]:
    given = listed if isinstance(listed, list | tuple) else ()
    return [x for x in given if isinstance(x, torch.Tensor)]


def is_outside(name: str, group: Any) -> bool:
    """Whether this rank is no member of a group; then it is warned."""
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        return False
    warnings.warn(f"{name} of a group in which this rank is not; nothing is done", stacklevel=3)
    return True


def op_name(op: Any) -> str:
    """Return the name of one of `torch.distributed.ReduceOp`, or what was given, as a name."""
    for theirs, name in _OP_OF:
        if op == theirs:
            return name
    return str(op)
