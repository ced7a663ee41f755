"""Puts fake devices in the place of `torch.cuda` for as long as a block lasts.

with fake_cuda() as cuda:
    torch.zeros(3, device="cuda")
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils import _device

from devicetest.graphs import Graph, graph_block
from devicetest.machine import DeviceGenerator, Event, Machine, Stream
from devicetest.nccl.registration import in_place_of_nccl
from devicetest.tensors import DeviceMode, DeviceTensor, to_device, to_host

DEVICE_NAME, CAPABILITY = "a fake device", (9, 0)
NUM_MULTIPROCESSORS = 132  # as many as an H100 has


@contextlib.contextmanager
def fake_cuda(
    *,
    devices: int = 1,
    unchecked: Sequence[tuple[Any, str]] = (),
    nccl: Mapping[str, Any] | None = None,
) -> Iterator[Machine]:
    """Make `torch.cuda` have that many devices in this process, threads begun inside too.

    Args:
        unchecked: (module, name) of functions that refuse tensors of a subclass; they are not
            called for those of the fake devices, which are plain ones to the code under test.
        nccl: fields of `NcclRules` for the groups made inside.
    """
    machine = Machine(devices=devices)
    with contextlib.ExitStack() as stack:
        for owner, name in unchecked:
            stack.enter_context(mock.patch.object(owner, name, _but_devices(getattr(owner, name))))
        for owner, names in _replacements(machine):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(in_place_of_nccl(machine=machine, **(nccl or {})))
        stack.enter_context(_swapped_parameters())
        stack.enter_context(DeviceMode(machine))
        yield machine


def _replacements(machine: Machine) -> list[tuple[Any, dict[str, Any]]]:
    cuda = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: machine.num_devices,
        "current_device": machine.current_device,
        "set_device": machine.set_device,
        "device": _device_block(machine),
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: DEVICE_NAME,
        "get_device_properties": lambda device=None: _properties(machine, device),
        "synchronize": machine.synchronize,
        "memory_allocated": lambda device=None: machine.allocated[machine.index_of(device)],
        "max_memory_allocated": lambda device=None: machine.peak[machine.index_of(device)],
        "reset_peak_memory_stats": lambda device=None: _reset_peak(machine, device),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": machine.is_capturing,
        "CUDAGraph": _maker(lambda *_, **__: Graph(machine), Graph),
        "graph": graph_block(machine),
        "Stream": _maker(machine.stream, Stream),
        "Event": _maker(lambda **options: _event(machine, **options), Event),
        "current_stream": machine.current_stream,
        "stream": _use_stream,
        "cudart": lambda: _Runtime(machine),
        "default_generators": machine.generators,
        "is_bf16_supported": lambda *_: True,
        "_sleep": lambda cycles: machine.count("sleep"),
        "mem_get_info": lambda device=None: (
            machine.memory_bytes - machine.allocated[machine.index_of(device)],
            machine.memory_bytes,
        ),
    }
    tensor = {
        "to": _make_to(machine, torch.Tensor.to),
        "cpu": lambda self, **_: self.to("cpu"),
        "cuda": lambda self, device=None, non_blocking=False: self.to(
            torch.device("cuda", machine.index_of(device)), non_blocking=non_blocking
        ),
        "pin_memory": lambda self, *_: torch.empty_like(self, pin_memory=True).copy_(self),
        "new_tensor": lambda self, data, *, dtype=None, device=None, **given: torch.tensor(
            data, dtype=dtype or self.dtype, device=device or self.device, **given
        ),
        "is_pinned": lambda self, *_: machine.is_pinned(self),
    }
    makers = {
        name: _make_from_data(machine, getattr(torch, name)) for name in ("tensor", "as_tensor")
    }
    makers["Generator"] = _maker(_make_generator(machine, torch.Generator), torch.Generator)
    makers["Stream"] = _maker(lambda device=None, **_: machine.stream(device), Stream)
    makers["Event"] = _maker(lambda device=None, **options: _event(machine, **options), Event)
    accelerator = {
        "is_available": lambda: True,
        "current_stream": machine.current_stream,
        "current_device_index": machine.current_device,
        "synchronize": machine.synchronize,
    }
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with DeviceMode(machine):
            run(thread)

    return [
        (torch.cuda, cuda),
        (torch.cuda.random, {name: cuda[name] for name in ("current_device", "device_count")}),
        (torch.accelerator, accelerator),
        (torch.Tensor, tensor),
        (torch, makers),
        (threading.Thread, {"run": run_in_mode}),
        (functional, {"scaled_dot_product_attention": _attention}),
    ]


def _properties(machine: Machine, device: Any) -> SimpleNamespace:
    """What torch says of a device; all else of a card is an AttributeError that names it.

    Raises:
        RuntimeError: there is no such device.
    """
    machine.index_of(device)
    return SimpleNamespace(
        name=DEVICE_NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=machine.memory_bytes,
        multi_processor_count=NUM_MULTIPROCESSORS,
    )


_plain_attention = functional.scaled_dot_product_attention


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **given: Any,
) -> torch.Tensor:
    """Attention whose mask is made on the device where torch's own code would make it on the CPU.

    With values as wide as keys there is a kernel that needs none.
    """
    is_wide = value.shape[-1] != key.shape[-1]
    if is_causal and is_wide and isinstance(query, DeviceTensor):
        shape = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **given)


def _but_devices(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        return None if any(isinstance(x, DeviceTensor) for x in args) else check(*args)

    return checked


class _Runtime:
    """What `torch.cuda.cudart()` returns."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Lock pages."""
        return self._machine.page_lock(address, num_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock them."""
        return self._machine.page_unlock(address)


def _event(machine: Machine, *, blocking: bool = False, **_: Any) -> Event:
    return Event(machine, blocking=blocking)


def _maker(make: Callable[..., Any], kind: type) -> type:
    """Return a class that `isinstance` knows and whose calls make something else."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

    return Meta(kind.__name__, (), {})


def _use_stream(stream: Stream | None) -> Any:
    return contextlib.nullcontext() if stream is None else stream


def _device_block(machine: Machine) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def block(device: Any) -> Iterator[None]:
        with machine.current_stream(device):
            yield

    return block


def _reset_peak(machine: Machine, device: Any) -> None:
    index = machine.index_of(device)
    machine.peak[index] = machine.allocated[index]


@contextlib.contextmanager
def _swapped_parameters() -> Iterator[None]:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _make_to(machine: Machine, plain_to: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.to` that knows the fake devices; torch's takes all for the same one."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, late = _parse_to(args, kwargs)
        mine = isinstance(self, DeviceTensor)
        if device is None or (device.type == "cpu" and not mine) or device.type == "meta":
            return plain_to(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.requires_grad and _differs(self, device, machine):
            return _Move.apply(self, device, dtype, late)
        if device.type == "cuda":
            index = machine.index_of(device)
            if not mine:
                return to_device(machine, self, index, dtype, non_blocking=late)
            if self.get_device() != index:
                made = torch.empty_like(self, device=device, dtype=dtype or self.dtype)
                return made.copy_(self)
        if device.type == "cpu":
            return to_host(self.detach(), dtype, non_blocking=late)  # type: ignore[arg-type]
        return plain_to(self, dtype or self.dtype, copy=bool(kwargs.get("copy")))

    return to


class _Move(torch.autograd.Function):
    """A move whose gradient moves back."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, device: torch.device, dtype: torch.dtype | None, late: bool
    ) -> torch.Tensor:
        """Move."""
        ctx.back = (source.device, source.dtype)
        return source.detach().to(device, dtype or source.dtype, non_blocking=late)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Move the gradient back."""
        device, dtype = ctx.back
        return grads[0].to(device, dtype), None, None, None


def _differs(tensor: torch.Tensor, device: torch.device, machine: Machine) -> bool:
    if device.type != tensor.device.type:
        return True
    return device.type == "cuda" and machine.index_of(device) != tensor.get_device()


def _parse_to(
    args: Any, kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = []
    for value in args:
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            device = value
    late = bool(kwargs.get("non_blocking", flags[0] if flags else False))
    return None if device is None else torch.device(device), dtype, late


def _make_generator(machine: Machine, plain: Callable[..., Any]) -> Callable[..., Any]:
    def make(device: Any = "cpu") -> Any:
        wanted = torch.device(device)
        return plain() if wanted.type != "cuda" else DeviceGenerator(machine.index_of(wanted))

    return make


def _make_from_data(machine: Machine, plain: Callable[..., Any]) -> Callable[..., Any]:
    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        # torch adds its default device to calls of its own functions, of which this is none.
        device = _device.CURRENT_DEVICE if device is None else device
        wanted = None if device is None else torch.device(device)
        if wanted is None or wanted.type != "cuda":
            return plain(data, *args, device=device, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return plain(data, *args, **kwargs).to(wanted).requires_grad_(grad)

    return make
