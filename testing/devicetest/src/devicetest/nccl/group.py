"""The process group of NCCL's rules: torch's calls become operations for the referee.

group = NcclRuleGroup(options, NcclRules(order="communicator"))
group.send([x], 1).wait()
"""

import threading
import uuid
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore
from torch.utils._pytree import tree_leaves

from devicetest.findings import where
from devicetest.machine import Machine
from devicetest.nccl.arithmetic import SUPPORTED_DTYPES, SUPPORTED_OPS
from devicetest.nccl.exchange import Exchange, NcclRuleError, join
from devicetest.nccl.referee import Comm, Part
from devicetest.nccl.rules import BUFFERS, NcclRules
from devicetest.nccl.watchdog import Watchdog
from devicetest.nccl.work import RuleWork, Shelf
from devicetest.tensors import DeviceTensor

BACKEND_NAME = "nccl_rules"
Tensors = Sequence[torch.Tensor]
_WHOLE = ""  # the lane of collectives and batches


class _Call:
    """One operation in the making: its part, what it reads and what it fills.

    A call that `runs_apart` has a stream of its own, as transfers and collectives with `async_op`;
    others run in the current stream.
    """

    def __init__(self, part: Part, reads: Tensors, fills: Tensors, *, runs_apart: bool) -> None:
        self.part, self.reads, self.fills = part, list(reads), list(fills)
        self.runs_apart = runs_apart


class _Backend(Backend):
    """What torch and its users ask of a group's backend; calls are the group's."""

    supports_coalescing = True
    supports_splitting = supports_window = supports_reconfigure = supports_shrinking = False
    _supports_time_estimate = False

    def __init__(self, group: "NcclRuleGroup") -> None:
        super().__init__(group.rank(), group.size())
        self._limit_s, self._abort = 0.0, group.abort

    @property
    def options(self) -> Any:
        """The group's limit."""
        return SimpleNamespace(_timeout=timedelta(seconds=self._limit_s))

    def getBackendName(self) -> str:
        """Return the name of the backend; torch asks."""
        return BACKEND_NAME

    def abort(self) -> None:
        """Let all that waits for the group's device go on, with garbage."""
        self._abort()


class NcclRuleGroup(dist.ProcessGroup):
    """A group on which only what NCCL allows comes to an end.

    Attributes:
        rules: how it behaves.
        timed_waits: the lines that waited with a limit, which stops the host under NCCL.
        issued: one line for each call, in order.
    """

    def __init__(self, options: Any, rules: NcclRules) -> None:
        super().__init__(options.store, options.group_rank, options.group_size)
        kind, backend = dist.ProcessGroup.BackendType.CUSTOM, _Backend(self)
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):  # devices of the fixture are the CPU to torch's C++
            self._register_backend(torch.device(device), kind, backend)
        self._backend = backend
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.rules, self._ranks = rules, ranks
        self.timed_waits: list[str] = []
        self.issued: list[str] = []
        self._me = options.group_rank
        self._limit_s = backend._limit_s = options.timeout.total_seconds()
        self._name, self._desc = options.group_id, ""
        self._batch: list[_Call] | None = None
        self._streams: dict[tuple[str, int], Any] = {}
        self._here = threading.local()
        # Where ranks are to die, the referee must not die with just any of them.
        holder = ranks[0] if rules.watchdog else None
        self._exchange: Exchange = join(options.store, ranks[self._me], holder=holder)
        self.host: Any = None
        if rules.host:
            self.host = dist.ProcessGroupGloo(
                PrefixStore("host", options.store), self._me, options.group_size, options.timeout
            )
        if self._me == 0:
            options.store.set("devicetest/comm", uuid.uuid4().hex)
        name = options.store.get("devicetest/comm").decode()
        self._comm = Comm(
            name=name,
            ranks=ranks,
            buffer_bytes=BUFFERS[rules.buffering],
            is_silent=rules.watchdog,
            queue="device" if rules.order == "device" else "",
        )
        self._is_aborted = False
        self._watchdog = Watchdog(self._limit_s, kills=rules.watchdog)

    # ------------------------------------------------------------------ what torch asks

    @property
    def group_name(self) -> Any:
        """The name that torch gave."""
        return str(self._name)

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """The description that torch gave."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        if self.rules.host:
            return [torch.device("cpu"), torch.device("cuda")]
        return [torch.device("cpu" if self.rules.any_device else "cuda")]

    def getBackendName(self) -> str:
        """Return the name of the backend; torch asks."""
        return BACKEND_NAME

    def getGroupName(self) -> str:
        """Return the name that torch gave; torch asks."""
        return str(self._name)

    def setGroupName(self, name: str) -> None:
        """Take the name; torch tells."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description that torch gave; torch asks."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Take the description; torch tells."""
        self._desc = desc

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the group's limit."""
        self._limit_s = self._backend._limit_s = timeout.total_seconds()

    def launches(self) -> list[str]:
        """Return the ranks and the name of the group of each call of this process, in order."""
        return list(self._exchange.issued)

    def shutdown(self) -> None:
        """Nothing is to be given back."""

    def abort(self) -> None:
        """Let all that waits for the device go on, with garbage; calls are refused from now on."""
        self._is_aborted = True
        for pending in self._watchdog.stop():
            pending.abort()

    # ------------------------------------------------------------------ transfers

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        """Send; the tag is ignored, as by NCCL."""
        if self.is_for_host(tensors):
            return self.host.send(tensors, dst, tag)
        return self._transfer("send", tensors, dst)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        """Receive."""
        if self.is_for_host(tensors):
            return self.host.recv(tensors, src, tag)
        return self._transfer("recv", tensors, src)

    def is_for_host(self, arguments: Any) -> bool:
        """Whether a call is gloo's: the group has it, and no tensor is on a device."""
        if self.host is None:
            return False
        return not any(isinstance(x, DeviceTensor) for x in tree_leaves(arguments))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Raise: NCCL has no such call, gloo has."""
        if self.is_for_host(tensors):
            return self.host.recv_anysource(tensors, tag)
        raise NcclRuleError("NCCL cannot receive from any rank; name the source")

    def _transfer(self, kind: str, tensors: Tensors, peer: int) -> Any:
        if peer == self._me:
            raise NcclRuleError(f"rank {peer} cannot {kind} to itself outside of a batch on NCCL")
        self._check(kind, tensors)
        sends = kind == "send"
        part = Part(
            kind=kind,
            peer=self._ranks[peer],
            num_bytes=tensors[0].nbytes,
            chunks=tuple(map(bytes_of, tensors)) if sends else (),
        )
        low, high = sorted((self._me, peer))
        lane = f"{low}-{high}" if self.rules.order == "pair" else _WHOLE
        reads, fills = (tensors, ()) if sends else ((), tensors)
        return self._issue(_Call(part, reads, fills, runs_apart=True), lane)

    def _start_coalescing(self, device: torch.device) -> None:
        if self._batch is not None:
            raise NcclRuleError("a batch of calls begins within another one of the same group")
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        batch, self._batch = self._batch, None
        return self._launch(batch, _WHOLE) if batch else None

    # ------------------------------------------------------------------ all calls

    def collective(
        self,
        kind: str,
        terms: tuple[object, ...],
        given: Sequence[bytes],
        reads: Tensors,
        fills: Tensors,
        expected: tuple[int, ...] = (),
    ) -> Any:
        """Issue one collective; `terms` is what all ranks have in common."""
        if kind != "barrier":
            self._check(kind, [*reads, *fills])
        part = Part(kind=kind, terms=terms, chunks=tuple(given), expected=expected)
        runs_apart = getattr(self._here, "runs_apart", True)
        return self._issue(_Call(part, reads, fills, runs_apart=runs_apart), _WHOLE)

    def note_barrier(self) -> None:
        """Let the host have waited for the device, as a barrier does."""
        machine = self.rules.machine
        if machine is not None:
            machine.note_sync("barrier")
            machine.host_waits(machine.current_stream().clock)

    def note_options(self, arguments: Sequence[Any]) -> None:
        """Read from the options of this thread's next collective whether it has `async_op`."""
        told = [x.asyncOp for x in arguments if hasattr(x, "asyncOp")]
        self._here.runs_apart = told[-1] if told else True

    def op_name(self, op: Any) -> str:
        """Return the name of a reduction that NCCL has.

        Raises:
            NcclRuleError: it has not.
        """
        name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
        if name not in SUPPORTED_OPS:
            raise NcclRuleError(f"NCCL has no ReduceOp.{name}; it has {', '.join(SUPPORTED_OPS)}")
        return name

    def _issue(self, call: _Call, lane: str) -> Any:
        if self._batch is not None:
            self._batch.append(call)
            return None
        return self._launch([call], lane)

    def _launch(self, calls: list[_Call], lane: str) -> RuleWork:
        place = where()
        if self._is_aborted:
            raise NcclRuleError(f"NCCL communicator was aborted on rank {self._me} ({place})")
        self._exchange.issued.append(f"{self._comm.ranks} {self._name}")
        self.issued.append(f"{' + '.join(str(call.part) for call in calls)} at {place}")
        fills = [[plain(tensor).detach() for tensor in call.fills] for call in calls]
        before_wait, shelf, device = self._order_streams(calls, lane)

        def fill(brought: dict[int, list[bytes]]) -> None:
            for index, targets in enumerate(fills):
                for target, chunk in zip(targets, brought[index], strict=True):
                    write_bytes(target, chunk)
            fills.clear()  # memory that the program frees afterwards is free at once

        pending = self._exchange.post(
            [call.part for call in calls],
            comm=self._comm,
            lane=lane,
            where=place,
            device=device,
            fill=fill,
        )
        self._watchdog.add(pending)
        results = [tensor for call in calls for tensor in (call.fills or call.reads)]
        limit_s = None if self.rules.watchdog else self._limit_s
        work = RuleWork(
            pending,
            limit_s=limit_s,
            results=results,
            before_wait=before_wait,
            # As torch, which aborts the communicator before it raises; else a test may wait again.
            expired=self.abort if self.rules.watchdog else lambda: None,
        )
        if shelf is not None:
            work.keep(shelf)
        return work

    def _order_streams(self, calls: list[_Call], lane: str) -> tuple[Any, Shelf | None, str]:
        """Let the lane's stream use the tensors, after what the current stream has done."""
        used = [x for call in calls for x in (*call.reads, *call.fills)]
        mine = [x for x in used if isinstance(x, DeviceTensor)]
        if not mine:
            return self._note_limits(None, None, 0), None, ""
        machine, index = mine[0].machine, mine[0].ordinal
        stream = machine.current_stream(index)
        runs_apart = any(call.runs_apart for call in calls)
        if runs_apart:
            apart = self._streams.setdefault((lane, index), machine.stream(index))
            apart.wait_stream(stream)
            stream = apart
        stream.tick()
        kept: list[torch.Tensor] = []
        for call in calls:
            for tensors, writes in ((call.reads, False), (call.fills, True)):
                for tensor in tensors:
                    machine.touch(plain(tensor), stream, writes=writes)
                    if call.part.peer >= 0:
                        machine.record_stream(plain(tensor), stream)
                    elif runs_apart:
                        kept.append(plain(tensor))
        event = stream.record_event()
        shelf = Shelf(kept, machine, stream) if kept else None
        return self._note_limits(machine, event, index), shelf, f"cuda:{index} of this machine"

    def _note_limits(self, machine: Machine | None, event: Any, index: int) -> Any:
        def before_wait(limited: bool) -> None:
            if limited:
                self.timed_waits.append(where())
            if machine is not None:
                machine.current_stream(index).wait_event(event)
                if limited:
                    machine.note_sync("wait with a limit")
                    machine.host_waits(event.clock)

        return before_wait

    def _check(self, kind: str, tensors: Tensors) -> None:
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor) and not self.rules.any_device:
                raise NcclRuleError(
                    f"{kind}: a tensor of the CPU {tuple(tensor.shape)} is given to NCCL: No "
                    "backend type associated with device type cpu"
                )
            if not tensor.is_contiguous():
                raise NcclRuleError(f"{kind}: Tensors must be contiguous, got {tensor.stride()}")
            if tensor.dtype not in SUPPORTED_DTYPES and not tensor.dtype.is_complex:
                raise NcclRuleError(f"{kind}: NCCL does not support tensors of {tensor.dtype}")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU memory of a tensor."""
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor, of a copy to it that is due too."""
    if isinstance(tensor, DeviceTensor):
        tensor.machine.settle(tensor.held)
    inner = plain(tensor).detach()
    return bytes(inner.reshape(-1).view(torch.uint8).numpy()) if inner.numel() else b""


def write_bytes(target: torch.Tensor, chunk: bytes) -> None:
    """Fill a contiguous tensor of the CPU."""
    if chunk:
        with torch.no_grad():
            flat = target.reshape(-1).view(torch.uint8)
            flat.copy_(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
