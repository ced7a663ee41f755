"""Tensors that say `cuda:N`: the values lie in CPU memory, operations run there and then.

Only copies between a device and pinned memory run later (see `machine`). An operation is one of the
current stream of its tensors' device; what it reads and writes follows from its schema.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from devicetest.machine import Machine, Stream

_MANY_DEVICES = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_")
_STOP_THE_HOST = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
)
_POISON = 0xA5
_OF_THE_ENGINE = ("aten::zeros", "aten::ones")
_ENGINE = os.path.join("torch", "autograd", "graph.py")
_BETWEEN = (os.path.dirname(__file__), os.path.join(os.path.dirname(torch.__file__), "_compile.py"))


class DeviceTensor(torch.Tensor):
    """A tensor of a fake device; `held` has its values."""

    held: torch.Tensor
    machine: Machine
    ordinal: int

    @staticmethod
    def __new__(
        cls: type["DeviceTensor"],
        inner: torch.Tensor,
        machine: Machine,
        index: int,
        requires_grad: bool = False,
    ) -> "DeviceTensor":
        """Wrap CPU memory; autograd's engine, which has no such device, takes it for that."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cpu"),
            requires_grad=requires_grad,
        )
        made.held, made.machine, made.ordinal = inner, machine, index
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.ordinal})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The fake device."""
        return torch.device("cuda", self.ordinal)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    def get_device(self) -> int:
        """Return the number of the device."""
        return self.ordinal

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        plain: torch.Tensor = torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]
        return plain

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Take the memory of another tensor of a device."""
        if not isinstance(other, DeviceTensor):
            raise TypeError("a tensor of a device cannot take memory of the host")
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held, self.ordinal = other.held, other.ordinal

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""
        return self.held.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        """False: that is a property of host memory."""
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Do not free the memory before the stream has done what it has by then."""
        self.machine.record_stream(self.held, stream)

    def tolist(self) -> Any:
        """Return the values; stops the host."""
        return to_host(self, None, non_blocking=False).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        return made  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of device tensors."""
        mine = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor))
        return run_operation(mine.machine, func, args, kwargs or {})


def _run_in_mode(
    mode: "DeviceMode", func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return run_operation(mode.machine, func, args, kwargs or {})


# torch would wrap it so that dynamo leaves it alone, and import dynamo for it, which takes seconds.
setattr(_run_in_mode, "__dynamo_disable", _run_in_mode)


class DeviceMode(TorchDispatchMode):
    """Lets functions that make tensors make them on a fake device; one a thread."""

    __torch_dispatch__ = _run_in_mode

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine


def run_operation(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation: on the host if nothing of it is on a device."""
    name: str = func._schema.name
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    mine = [x for x in leaves if isinstance(x, DeviceTensor)]
    device = kwargs.get("device")
    wanted = None if device is None else torch.device(device)
    if kwargs.get("pin_memory"):
        made = func(*args, **{key: x for key, x in kwargs.items() if key != "pin_memory"})
        return machine.allocate_pinned(made)
    if not mine and (wanted is None or wanted.type != "cuda"):
        if name in _OF_THE_ENGINE and _is_from_the_engine():
            return run_operation(
                machine, func, args, {**kwargs, "device": f"cuda:{machine.current_device()}"}
            )
        return func(*args, **kwargs)
    machine.raise_left_error()
    if name == "aten::copy_" and _crosses(args[0], args[1]):
        return _copy_across(machine, *args, **kwargs)
    if name == "aten::_to_copy" and _moves(args[0], wanted):
        dtype, late = kwargs.get("dtype"), bool(kwargs.get("non_blocking"))
        source = args[0]
        if isinstance(source, DeviceTensor):
            # `Tensor.to` has its own way; this is autograd's engine, which casts a gradient to what
            # it takes for its tensor's device.
            return _run_on_device(machine, func, args, kwargs, source.ordinal)
        return to_device(machine, source, machine.index_of(wanted), dtype, non_blocking=late)
    index = machine.index_of(wanted) if wanted is not None else mine[0].ordinal
    if wanted is None or name in _MANY_DEVICES:
        _check_devices(name, leaves, index)
    others = {x.ordinal for x in mine} - {index}
    for other in others:  # a copy between two devices waits for both, and both wait for it
        machine.current_stream(index).wait_stream(machine.current_stream(other))
    out = _run_on_device(machine, func, args, kwargs, index)
    for other in others:
        machine.current_stream(other).wait_stream(machine.current_stream(index))
    return out


def _is_from_the_engine() -> bool:
    """Whether autograd's engine itself makes a tensor, of zeros for a gradient that is missing."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(_ENGINE)


def to_device(
    machine: Machine,
    source: torch.Tensor,
    index: int,
    dtype: torch.dtype | None,
    *,
    non_blocking: bool,
) -> torch.Tensor:
    """Return a copy of host memory on a device."""
    inner = torch.empty_like(source.detach(), dtype=dtype or source.dtype)
    machine.current_stream(index).tick()
    machine.born(inner, index)
    made = DeviceTensor(inner, machine, index)
    _copy_across(machine, made, source.detach(), non_blocking)
    return made


def to_host(source: DeviceTensor, dtype: torch.dtype | None, *, non_blocking: bool) -> torch.Tensor:
    """Return a copy of device memory in new pageable memory."""
    made = torch.empty_like(source.held.detach(), dtype=dtype or source.dtype)
    return _copy_across(source.machine, made, source.detach(), non_blocking)


def _copy_across(
    machine: Machine, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy between a device and the host: late, if the host's memory is pinned and may wait."""
    on_device = source if isinstance(source, DeviceTensor) else target
    host = target if isinstance(source, DeviceTensor) else source
    if not isinstance(on_device, DeviceTensor):
        raise TypeError("neither side of the copy is on a device")
    stream, to_the_host = machine.current_stream(on_device.ordinal), host is target
    stream.tick()
    machine.touch(on_device.held, stream, writes=not to_the_host)
    if not (on_device.is_contiguous() and host.is_contiguous() and host.dtype == on_device.dtype):
        machine.count("copy with a device temporary")
    late = non_blocking and machine.is_pinned(host)
    machine.count(f"{'late' if late else 'waited'} copy to {'host' if to_the_host else 'device'}")
    if not late:
        kind = "to the host" if to_the_host else "to the device"
        machine.note_sync(f"copy {kind}" + (" of pageable memory" if non_blocking else ""))
        machine.host_waits(stream.clock)
        (host if to_the_host else on_device.held).copy_(on_device.held if to_the_host else host)
    elif to_the_host:
        value = on_device.held.clone()  # as the stream has it; the host gets it later
        _poison(host)
        machine.defer(stream, lambda: _fill(host, value), fills=None)
    else:
        inner = on_device.held
        machine.defer(stream, lambda: _fill(inner, host), fills=inner)
    return target


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


def _poison(host: torch.Tensor) -> None:
    with torch.no_grad():
        if host.is_contiguous() and host.numel():
            host.reshape(-1).view(torch.uint8).fill_(_POISON)
        else:
            host.zero_()


def _run_on_device(
    machine: Machine, func: Any, args: Any, kwargs: dict[str, Any], index: int
) -> Any:
    name = func._schema.name
    stream = machine.current_stream(index)
    stream.tick()
    machine.count(name)
    if _stops_the_host(name, args, kwargs):
        machine.note_sync(name)
        machine.host_waits(stream.clock)
    for tensor, writes in _uses(func._schema.arguments, args, kwargs):
        machine.touch(tensor.held, stream, writes=writes)
    inner_kwargs = dict(kwargs)
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("cpu")
    inner_args, inner_kwargs = tree_map(_unwrap, (args, inner_kwargs))
    draws = torch.Tag.nondeterministic_seeded in func.tags and not inner_kwargs.get("generator")
    with machine.drawing(index) if draws else nullcontext():
        out = func(*inner_args, **inner_kwargs)
    fresh = not any(each.alias_info for each in func._schema.returns)
    machine.keep(partial(_again, func, inner_args, inner_kwargs, out if fresh else None))

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        if fresh:
            machine.born(value, index)
        return DeviceTensor(value, machine, index)

    wrapped = tree_map(wrap, out)
    if fresh:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _again(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Do a captured operation again: into what it made, or in place."""
    made = func(*args, **kwargs)
    if out is not None:
        for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
            if isinstance(old, torch.Tensor):
                _fill(old, new)


def _uses(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterable[tuple[DeviceTensor, bool]]:
    """Yield each device tensor that an operation reads or writes; views do neither."""
    by_name = {argument.name: argument.alias_info for argument in schema}
    infos = [argument.alias_info for argument in schema][: len(args)]
    given = [*zip(infos, args, strict=False), *((by_name[key], x) for key, x in kwargs.items())]
    for info, value in given:
        if info is not None and not info.is_write:
            continue
        for tensor in tree_leaves(value):
            if isinstance(tensor, DeviceTensor):
                yield tensor, bool(info and info.is_write)


def _stops_the_host(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in _STOP_THE_HOST:
        return True
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("aten::index", "aten::index_put_"):
        return any(
            i is not None and (i.dtype == torch.bool or not isinstance(i, DeviceTensor))
            for i in args[1]
        )
    return False


def _check_devices(name: str, leaves: Iterable[torch.Tensor], index: int) -> None:
    for tensor in leaves:
        other = tensor.ordinal if isinstance(tensor, DeviceTensor) else None
        if other == index or name in _MANY_DEVICES or (other is None and tensor.dim() == 0):
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got cuda:{index} and "
            f"{tensor.device}"
        )


def _crosses(target: torch.Tensor, source: torch.Tensor) -> bool:
    return isinstance(target, DeviceTensor) != isinstance(source, DeviceTensor)


def _moves(source: torch.Tensor, wanted: torch.device | None) -> bool:
    if wanted is None:
        return False
    return isinstance(source, DeviceTensor) != (wanted.type == "cuda")


def _unwrap(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value
