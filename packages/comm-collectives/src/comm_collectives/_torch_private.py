"""The private torch names that this package needs, in one place that an upgrade has to check.

`torch.distributed` keeps the store of the default group and a group's time limit to itself; the
failure reports need the one and control exchanges the other. A backend's base class is private as
well, and so are the number of the backward pass that runs, the hook at its end, and what runs it.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, wraps
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import Backend as Backend
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch.distributed.distributed_c10d import _get_default_store, _world, default_pg_timeout
from torch.nn.parameter import is_lazy as is_lazy
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

is_zerotensor = torch._is_zerotensor  # without elements, as autograd's zeros can be

F = TypeVar("F", bound=Callable[..., Any])
_WANTS_RAW: ContextVar[bool] = ContextVar("comm_collectives_wants_raw", default=False)


def graph_break(fn: F) -> F:
    """Let torch.compile run a function as it is, and all that it calls: the graph breaks there.

    As `torch.compiler.disable`, which imports the compiler (a second) and adds a frame to the call.
    """
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, skip)
    return fn


def raw_torch(fn: F) -> F:
    """Let a function have torch's own collectives, also while the drop-ins stand in their place."""

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _WANTS_RAW.set(True)
        try:
            return fn(*args, **kwargs)
        finally:
            _WANTS_RAW.reset(token)

    return run  # type: ignore[return-value]


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of which this process is a member."""
    return list(_world.pg_map)


def wants_raw_torch() -> bool:
    """Whether this thread is in such a function."""
    return _WANTS_RAW.get()


def is_coalescing(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a call of torch's function is one that torch keeps until its block of calls ends."""
    groups = _world.pg_coalesce_state
    if not groups:
        return False
    group = signature(fn).bind_partial(*args, **kwargs).arguments.get("group")
    return (_world.default_pg if group is None else group) in groups


def default_store() -> Store:
    """Return the store that `init_process_group` made.

    Raises:
        ValueError: no process group has been initialised.
    """
    return _get_default_store()


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return a group's own time limit in seconds, torch's default if its backend does not tell."""
    devices = {device.type for device in group._device_types}
    backend = group._get_backend(torch.device("cpu" if "cpu" in devices else min(devices)))
    try:
        limit = backend.options._timeout
    except (AttributeError, RuntimeError):  # backends of others need not have options
        limit = default_pg_timeout
    return float(timedelta.total_seconds(limit))


def completion_of(work: Any) -> Callable[[], bool]:
    """Return what tells whether something has ended on a device, without asking the device.

    NCCL's watchdog fills this future. An event that a thread asks for ends the capture of a graph,
    and a work kept for `is_completed`, of backends without such a future, keeps its tensors.
    """
    try:
        done: Callable[[], bool] = work.get_future_result().done
    except (AttributeError, NotImplementedError, RuntimeError):
        done = work.is_completed
    return done


def abort_devices(group: dist.ProcessGroup) -> None:
    """Let everything that the devices' backends of a group have been given come to an end.

    Raises:
        RuntimeError: a backend cannot do so.
    """
    for device in group._device_types:
        if device.type != "cpu":
            group._get_backend(device).abort()


def dump_flight_records() -> list[bytes]:
    """Return what torch's flight recorders have not seen end, a JSON text for each backend.

    Those of NCCL and gloo, of all groups of this process; only what this torch was built with.
    """
    dumps = [
        getattr(_c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    ]
    return [dump(includeCollectives=True, onlyActive=True) for dump in dumps if dump is not None]


def backward_pass_id() -> int:
    """Return the number of the backward pass that runs on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the backward pass that runs call this if it ends well, and let go of it in any case."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@cache
def watch_failed_backwards(call: Callable[[Sequence[Any]], None]) -> None:
    """Have this called after each backward pass that raises, with what the pass began with.

    Only once for each function, and for the rest of the process.
    """
    run: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @wraps(run)
    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(outputs, *args, **kwargs)
        except BaseException:
            call(outputs)
            raise

    torch.autograd._engine_run_backward = watched  # type: ignore[attr-defined, assignment]


def backends_may_be_python() -> bool:
    """Whether this torch lets a backend be a subclass written in Python."""
    try:
        Backend(0, 1)
    except TypeError:  # "No constructor defined": torch 2.11
        return False
    return True


def store_host(store: Store) -> str | None:
    """Return the host on which a store lives; None for one that is no server's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, TCPStore) else None
