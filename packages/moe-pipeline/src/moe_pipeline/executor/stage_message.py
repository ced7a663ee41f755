"""Messages between stages: activations forwards, gradients backwards, and the notice of a failure.

A packed message is a list of tensors whose first is its header: bytes that say which action sent
it, so that a receiver knows what arrived and refuses what it does not expect, and JSON of the rest.
Shapes and dtypes travel in the header that `isend_tensors` puts before its tensors, and those of
tensors that a device moves apart (`device_transfers.py`) in this one. Headers are made and read on
the host.

    packed = pack_message(Action(1, Kind.SEND_FORWARD, 3), message)
    action, message = unpack(packed.tensors)    # or a FailureNotice
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_pipeline.errors import MoEValueError
from moe_pipeline.executor.pytrees import Structure, flatten, unflatten
from moe_pipeline.schedules.table import Action

_END = b"\n"  # of the action
_ACTION_LENGTH = 24
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that travels apart from its message: where it belongs, on what type of device."""

    place: int
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageMessage:
    """What one stage gives another."""

    tensors: list[Tensor]  # detached
    # of activations, for each tensor whether it wants a gradient; of gradients, for each tensor
    # that wanted one whether there is one (only those are in `tensors`)
    flags: list[bool]
    # of activations, how the tensors are nested; see `executor/pytrees.py`
    structure: Structure = None
    announced: tuple[Announced, ...] = ()  # tensors that come apart; `tensors` lacks them
    # the announced tensors themselves, where they came with the message after all; on the host
    brought: tuple[Tensor, ...] = ()

    def with_announced(self, came: Sequence[Tensor]) -> "StageMessage":
        """The whole message, with what came apart."""
        tensors = list(self.tensors)
        for one, tensor in zip(self.announced, came, strict=True):
            tensors.insert(one.place, tensor)
        return replace(self, tensors=tensors, announced=(), brought=())

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """`tensors`, which stand for those of the message, nested as they were."""
        return unflatten(self.structure, tensors)

    def gradients(self) -> list[Tensor | None]:
        """Of gradients: one for each tensor that wanted one."""
        present = iter(self.tensors)
        return [next(present) if flag else None for flag in self.flags]


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """Why a rank gave up; with "" it ended well."""

    cause: str


def activations(outputs: tuple[Any, ...]) -> tuple[StageMessage, list[Tensor]]:
    """The message of a stage's outputs, and those of its tensors that want a gradient."""
    structure, tensors = flatten(outputs)
    wants_gradient = [t.requires_grad for t in tensors]
    message = StageMessage([t.detach() for t in tensors], wants_gradient, structure)
    return message, [tensor for tensor in tensors if tensor.requires_grad]


def gradients(found: Sequence[Tensor | None]) -> StageMessage:
    """The message of the gradients of a stage's inputs."""
    return StageMessage([g for g in found if g is not None], [g is not None for g in found])


@dataclass(frozen=True, slots=True)
class Packed:
    """A message ready to be sent: over the host, and beside it on a device."""

    tensors: list[Tensor]
    announced: tuple[Announced, ...] = ()
    beside: Sequence[Tensor] = ()  # the announced ones; none of them if they are in `tensors`


def pack_message(
    action: Action,
    message: StageMessage,
    apart: frozenset[str] = frozenset(),
    slot: tuple[Announced, ...] | None = None,
) -> Packed:
    """What `action`, a send, sends.

    Args:
        apart: the types of device whose tensors travel apart, unless they are empty.
        slot: what the receiver expects to come apart; where that is something else, the tensors are
            copied to the host, which waits for them, and travel in the message.
    """
    flags = [int(flag) for flag in message.flags]
    content: dict[str, object] = {"g": flags, "f": message.structure}
    beside: list[Tensor] = []
    within, announced = [], []
    for place, tensor in enumerate(message.tensors):
        kind = tensor.device.type
        if kind not in apart or not tensor.numel():
            within.append(tensor)
            continue
        announced.append(Announced(place, kind, tensor.dtype, tuple(tensor.shape)))
        beside.append(tensor.resolve_conj().resolve_neg().contiguous())
    if announced:
        content["d"] = [_told(one) for one in announced]
    if slot is not None and slot != tuple(announced):
        content["h"] = len(announced)
        while beside:
            within.append(beside.pop(0).cpu())
    return Packed([_header(str(action), content), *within], tuple(announced), beside)


def pack_notice(notice: FailureNotice) -> list[Tensor]:
    """A header alone."""
    return [_header("", {"cause": notice.cause})]


def unpack(packed: Sequence[Tensor]) -> tuple[Action, StageMessage] | FailureNotice:
    """Read what a rank sent: a message with the action that sent it, or a notice."""
    if not packed or packed[0].dtype != torch.uint8 or packed[0].dim() != 1:
        raise MoEValueError("a message without a header arrived; was it sent by another program?")
    header = packed[0].contiguous()
    told = ctypes.string_at(header.data_ptr(), header.numel())
    action, _, content = told.partition(_END)
    if action.isspace():
        return FailureNotice(json.loads(content)["cause"])
    flags, structure, announced, num_brought = _parsed(content)
    end = len(packed) - num_brought
    message = StageMessage(list(packed[1:end]), [*flags], structure, announced, tuple(packed[end:]))
    expected = sum(message.flags) if structure is None else len(message.flags)
    if expected != len(message.tensors) + len(announced):
        raise MoEValueError(
            f"the message of {action.decode().strip()} announces {expected} tensors and carries "
            f"{len(message.tensors) + len(announced)}"
        )
    return Action.parse(action.decode()), message


def _header(action: str, content: dict[str, object]) -> Tensor:
    # Of one length for most actions, so that messages of a pipeline are alike.
    told = action.ljust(_ACTION_LENGTH).encode() + _END + _ENCODE(content).encode()
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)


@lru_cache(maxsize=256)  # most microbatches are alike
def _parsed(content: bytes) -> tuple[tuple[bool, ...], Structure, tuple[Announced, ...], int]:
    found = json.loads(content)
    announced = tuple(
        Announced(place, kind, getattr(torch, name), tuple(shape))
        for place, kind, name, shape in found.get("d", ())
    )
    return tuple(bool(flag) for flag in found["g"]), found["f"], announced, int(found.get("h", 0))


def _told(one: Announced) -> list[object]:
    name = str(one.dtype).removeprefix("torch.")
    return [one.place, one.kind, name, list(one.shape)]
