"""Messages between stages: activations forwards, gradients backwards, and the news of a failure.

A message is a list of tensors whose first is its header: bytes that say which action sent it, so
that a receiver knows what arrived and refuses what it does not expect, and JSON of the rest. Shapes
and dtypes travel in the header that `isend_tensors` puts before its tensors; nothing is assumed
from earlier ones.

    message = pack_parcel(Action(1, Kind.SEND_FORWARD, 3), parcel)
    news = unpack(message)                      # news.action, news.parcel
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_pipeline.executor.pytrees import Form, put_together, take_apart
from moe_pipeline.schedules.table import Action

_END = b"\n"  # of the action
_ACTION_LENGTH = 24
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one stage gives another.

    Attributes:
        tensors: detached.
        flags: of activations, for each tensor whether it wants a gradient; of gradients, for each
            tensor that wanted one whether there is one (only those are in `tensors`).
        form: of activations, how the tensors are nested; see `executor/pytrees.py`.
    """

    tensors: list[Tensor]
    flags: list[bool]
    form: Form = None

    def nest(self, tensors: Sequence[Tensor]) -> Any:
        """`tensors`, which stand for those of the parcel, nested as they were."""
        return put_together(self.form, tensors)

    def gradients(self) -> list[Tensor | None]:
        """Of gradients: one for each tensor that wanted one."""
        present = iter(self.tensors)
        return [next(present) if flag else None for flag in self.flags]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A message as it was understood: a parcel of an action, or how a rank ended."""

    action: Action | None = None
    parcel: Parcel = field(default_factory=lambda: Parcel([], []))
    cause: str = ""


def activations(outputs: tuple[Any, ...]) -> tuple[Parcel, list[Tensor]]:
    """The parcel of a stage's outputs, and those of its tensors that want a gradient.

    Raises:
        TypeError: something among them cannot travel.
    """
    form, tensors = take_apart(outputs)
    parcel = Parcel([t.detach() for t in tensors], [t.requires_grad for t in tensors], form)
    return parcel, [tensor for tensor in tensors if tensor.requires_grad]


def gradients(found: Sequence[Tensor | None]) -> Parcel:
    """The parcel of the gradients of a stage's inputs."""
    return Parcel([g for g in found if g is not None], [g is not None for g in found])


def pack_parcel(action: Action, parcel: Parcel) -> list[Tensor]:
    """The message in which `action`, a send, carries `parcel`."""
    flags = [int(flag) for flag in parcel.flags]
    return [_header(str(action), {"g": flags, "f": parcel.form}), *parcel.tensors]


def pack_cause(cause: str) -> list[Tensor]:
    """The message that says why this rank gave up; with "" that it ended well."""
    return [_header("", {"cause": cause})]


def unpack(message: Sequence[Tensor]) -> News:
    """Read a message.

    Raises:
        ValueError: its first tensor is no header, or it announces other tensors than it carries.
    """
    if not message or message[0].dtype != torch.uint8 or message[0].dim() != 1:
        raise ValueError("a message without a header arrived; was it sent by another program?")
    header = message[0].contiguous()
    told = ctypes.string_at(header.data_ptr(), header.numel())
    action, _, content = told.partition(_END)
    if action.isspace():
        return News(cause=json.loads(content)["cause"])
    flags, form = _parsed(content)
    parcel = Parcel(list(message[1:]), [*flags], form)
    announced = sum(parcel.flags) if parcel.form is None else len(parcel.flags)
    if announced != len(parcel.tensors):
        raise ValueError(
            f"the message of {action.decode().strip()} announces {announced} tensors and carries "
            f"{len(parcel.tensors)}"
        )
    return News(action=Action.parse(action.decode()), parcel=parcel)


def _header(action: str, content: dict[str, object]) -> Tensor:
    # Of one length for most actions, so that messages of a pipeline are alike.
    told = action.ljust(_ACTION_LENGTH).encode() + _END + _ENCODE(content).encode()
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)


@lru_cache(maxsize=256)  # most microbatches are alike
def _parsed(content: bytes) -> tuple[tuple[bool, ...], Form]:
    found = json.loads(content)
    return tuple(bool(flag) for flag in found["g"]), found["f"]
