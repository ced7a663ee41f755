"""All ranks of a save agree, phase by phase, that every one of them succeeded.

An exception on one rank raises on every rank, with that rank and its cause in the message, so no
rank goes on alone and nobody waits for a rank that has given up. What is gathered is JSON. Waiting
is bounded by `timeout_s` and by the group's own timeout, whichever is shorter.

    with agreement.phase("write") as phase:
        phase.payload = write_my_files()
    phase.results  # every rank's payload, by rank
"""

import json
import math
from collections.abc import Sequence
from enum import Flag
from functools import cached_property, reduce
from operator import or_
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unified_ckpt._torch_private import group_limit_s, shared_store
from unified_ckpt.errors import SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.geometry.tensors import byte_view
from unified_ckpt.saving.commit.signs import Signs

_SHARE_OF_LIMIT = 0.75
_ROUND_BYTES = 16 * 1024 * 1024  # of all ranks together in one exchange
_USER_MISTAKES = (ValueError, TypeError)
_Flags = TypeVar("_Flags", bound=Flag)


class Agreement:
    """The ranks of a group during one save; without process groups, one rank alone.

    Args:
        group: the ranks, None for all of them.
        timeout_s: bound on each wait for the peers.
        subject: names the call in messages, for example `save('run/checkpoint-10')`.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float, subject: str) -> None:
        self._group = group
        self.subject = subject
        if dist.is_available() and dist.is_initialized():
            self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.rank = dist.get_rank(group)
        else:
            self._ranks = [0]
            self.rank = 0
        if self.rank < 0:
            raise SaveArgumentError(f"{subject}: this process is not in the group given")
        self._timeout_s = min(timeout_s, self._limit_s())

    def _limit_s(self) -> float:
        """How long to wait where a device's own limit ends the process, and names nobody."""
        if not dist.is_available() or not dist.is_initialized():
            return math.inf
        limits_s = [group_limit_s(self._group, device) for device in _own_devices(self._group)]
        return _SHARE_OF_LIMIT * min(limits_s, default=math.inf)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def global_rank(self, rank: int) -> int:
        """The rank in the world of a rank of the group."""
        return self._ranks[rank]

    @property
    def global_rank_here(self) -> int:
        """The rank of this process in the world."""
        return self._ranks[self.rank]

    def phase(self, name: str, *, checks_arguments: bool = False) -> "Phase":
        """Start a phase that ends when every rank has ended it; collective over the group.

        With `checks_arguments` a ValueError or TypeError counts as the caller's mistake.
        """
        return Phase(self, name, checks_arguments)

    def gather(self, name: str, payload: object) -> list[Any]:
        """Return every rank's payload (JSON types), by rank; collective over the group."""
        if self.size == 1:
            return [payload]
        text = json.dumps(payload, separators=(",", ":")).encode()
        return [json.loads(text) for text in self.gather_bytes(name, text)]

    def gather_bytes(self, name: str, text: bytes, *, keep: bool = True) -> list[bytes]:
        """Return every rank's bytes, by rank; collective over the group.

        Beside what it returns it needs 16 MiB at a time.

        Args:
            name: of the phase, for messages.
            text: of this rank; the lengths may differ.
            keep: whether this rank needs them; if not, it returns empty ones.
        """
        if self.size == 1:
            return [text]
        try:
            with self._signs.marked():  # so that peers that wait in vain can say who is missing
                return self._gather_texts(text, keep=keep)
        except RuntimeError as error:
            raise SavePeerError(self._lost(name, error, "did not arrive")) from error

    def any_of(self, name: str, flags: _Flags) -> _Flags:
        """Return the flags that any rank has raised; collective over the group.

        One small all-reduce, cheap enough for every training step.
        """
        if self.size == 1:
            return flags
        kinds = list(type(flags))
        raised = self.any_at(name, torch.tensor([kind in flags for kind in kinds]))
        found = (kind for kind, on in zip(kinds, raised.tolist(), strict=True) if on)
        return reduce(or_, found, type(flags)(0))

    def any_at(self, name: str, marks: torch.Tensor) -> torch.Tensor:
        """Return where any rank has a mark (bools, as many on each); collective over the group."""
        if self.size == 1:
            return marks
        raised = marks.to(_collective_device(self._group), torch.uint8)
        try:
            work = dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._group, async_op=True)
            if work is not None:
                self._signs.wait(work, self._timeout_s)
        except RuntimeError as error:
            absent = "did not arrive, or died or went on as soon as they had"
            raise SavePeerError(self._lost(name, error, absent)) from error
        return raised.to("cpu", torch.bool)

    def _gather_texts(self, text: bytes, *, keep: bool) -> list[bytes]:
        device = _collective_device(self._group)
        here = torch.tensor([len(text), self._signs.number], dtype=torch.int64, device=device)
        pairs = [there.tolist() for there in self._all_gather(here)]
        lengths = [length for length, _ in pairs]
        self._signs.number = max(number for _, number in pairs)
        longest, step = max(lengths), max(1, _ROUND_BYTES // self.size)
        texts = [bytearray() for _ in lengths]
        for begin in range(0, longest, step):
            padded = torch.zeros(min(step, longest - begin), dtype=torch.uint8, device=device)
            part = bytearray(text[begin : begin + step])
            if part:
                padded[: len(part)] = torch.frombuffer(part, dtype=torch.uint8).to(device)
            for rank, got in enumerate(self._all_gather(padded)):
                if keep and lengths[rank] > begin:
                    texts[rank] += byte_view(got.cpu())[: lengths[rank] - begin]
        return [bytes(text) for text in texts]

    def _lost(self, name: str, error: RuntimeError, absent: str) -> str:
        """Describe a wait that failed, naming the ranks that gave no sign of life."""
        return (
            f"rank {self.global_rank_here}, {self.subject}: waiting in {name!r} for ranks "
            f"{self._ranks} failed: {self._found(absent)} (limit {self._timeout_s:g} s). A rank "
            "that does not arrive died, is stuck or is slower than that; see its own messages. "
            f"Cause: {error}"
        )

    def _found(self, absent: str) -> str:
        try:
            if shared_store() is None:
                return "a peer did not arrive (which one, a FileStore cannot tell)"
            silent = self._signs.find_silent()
        except RuntimeError:
            return "the store that knows who arrived is gone as well"
        told = [
            f"ranks {[self._ranks[r] for r in named]} {what}"
            for named, what in (
                (silent.absent, absent),
                (silent.arrived, "had arrived, and have died or stopped since"),
            )
            if named
        ]
        return " and ".join(told) or "all ranks live, so the connection between two of them broke"

    @cached_property
    def _signs(self) -> Signs:
        return Signs(shared_store(), ranks=self._ranks, rank=self.rank, about=self.subject)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(gathered, tensor, group=self._group, async_op=True)
        if work is not None:
            self._signs.wait(work, self._timeout_s)
        return gathered


class Phase:
    """One phase of an agreement; see the module."""

    def __init__(self, agreement: Agreement, name: str, checks_arguments: bool) -> None:
        self._agreement = agreement
        self._name = name
        self._checks_arguments = checks_arguments
        self.payload: Any = None
        self.results: list[Any] = []

    def __enter__(self) -> "Phase":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        report = None if error is None else _report(error)
        try:
            answers = self._agreement.gather(self._name, [report, self.payload])
        except SavePeerError as lost:
            if error is None:
                raise
            if not isinstance(error, Exception):
                return
            kind_here = SavePeerError if isinstance(error, SavePeerError) else SaveError
            raise kind_here(
                f"{self._agreement.subject}: rank {self._agreement.global_rank_here} failed in "
                f"{self._name!r}: {_report(error)['text']}; the peers could not be told: {lost}"
            ) from error
        self.results = [payload for _, payload in answers]
        failed = [rank for rank, (cause, _) in enumerate(answers) if cause is not None]
        if failed and (error is None or isinstance(error, Exception)):
            raise self._failure(failed, [answers[rank][0] for rank in failed]) from error

    def _failure(self, ranks: Sequence[int], reports: Sequence[dict[str, Any]]) -> SaveError:
        ranks_of: dict[str, list[int]] = {}
        for rank, report in zip(ranks, reports, strict=True):
            ranks_of.setdefault(report["text"], []).append(self._agreement.global_rank(rank))
        causes = "; ".join(
            f"rank {', '.join(map(str, who))} failed in {self._name!r}: {text}"
            for text, who in ranks_of.items()
        )
        mistake = self._checks_arguments and all(report["mistake"] for report in reports)
        kind = SaveArgumentError if mistake else SaveError
        return kind(f"{self._agreement.subject}: {causes}")


def _report(error: BaseException) -> dict[str, Any]:
    name = type(error).__name__
    return {"text": f"{name}: {error}", "mistake": isinstance(error, _USER_MISTAKES)}


def _collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors the group's backend carries; the CPU where it can."""
    config = str(dist.get_backend_config(group))
    if "cpu:" in config or "gloo" in config or "mpi" in config:
        return torch.device("cpu")
    return next(iter(_own_devices(group)))


def _own_devices(group: dist.ProcessGroup | None) -> list[torch.device]:
    """The devices that have a backend of their own, such as NCCL."""
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config(group)).split(",")]
    kinds = [kind for kind, _, name in pairs if kind != "cpu" and name not in {"gloo", "mpi"}]
    return [torch.device(kind, torch.get_device_module(kind).current_device()) for kind in kinds]
