"""Outputs that are dropped after use and computed again in backward.

What stands before a product (a norm, an activation) is cheap to compute, but its output is saved,
because the product needs it for the gradient of its weight. Here such an output is saved by
nobody: once the forward has gone on its memory is free, and the first operation whose backward
needs it has it computed again, once for all (Megatron-Core's output-discarding recompute, arXiv
2603.07685). The product itself is not repeated.

    with discard_outputs():
        hidden = discarded(norm, x)      # instead of norm(x)
        y = linear(hidden)               # saves no copy of hidden, and neither do others

Invariant: values, gradients and random numbers are those without it. Only inputs of the discarded
function stay, and what it `recorded` (`moe_pipeline.recomputation.recomputing`). Within a backward
that is split (`moe_pipeline.weight_grad.store`) the output is computed again once, in I; the store
keeps it until W.

Outside of `discard_outputs`, and where other hooks on saved tensors lie between, such as within
`recompute`, `discarded(f, x)` is `f(x)`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_pipeline._torch_private import (
    SavedTensorsHooks,
    saved_tensors_hooks_in_force,
    storage_address,
    version_of,
)
from moe_pipeline.errors import MoETypeError
from moe_pipeline.recomputation.recomputing import recompute

_Value = TypeVar("_Value")


@contextmanager
def discard_outputs() -> Iterator[None]:
    """Within it outputs of `discarded` are not saved for backward. Put it around a forward.

    Inside other contexts of `saved_tensors_hooks`, such as `offload_activations`: whatever is saved
    and not discarded goes on to them.
    """
    hooks = _Hooks(saved_tensors_hooks_in_force())
    try:
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield
    finally:
        hooks.forget()


def discarded(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return `function(*args, **kwargs)`; backward computes it again instead of keeping it.

    Worth its time where the function is cheap and its output is used by operations that save it;
    what else holds the output holds its memory too; where it was changed in place it is saved. Not
    collective, unless the function is.

    Args:
        function: makes the same calls each time, as for `recompute`; returns one tensor.
        args: of the function; tensors among them are kept for the backward.
        kwargs: of the function.

    Raises:
        TypeError: the function returns something else than a tensor.
    """
    top = saved_tensors_hooks_in_force()
    hooks = getattr(top[0], "__self__", None) if top is not None else None
    if not isinstance(hooks, _Hooks) or not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def run(*given: Any, **named: Any) -> Tensor:
        out = function(*given, **named)
        if not isinstance(out, Tensor):
            raise MoETypeError(
                f"discarded needs a function that returns one tensor, got {type(out).__name__}; "
                "use recompute"
            )
        kept: Tensor = _SavedInput.apply(out)
        # Filled after `out` is saved, where the second forward ends.
        with torch.no_grad():
            kept.data = out  # gate: late-attribute - a tensor's values, not a field
        return kept

    output = recompute(run, *args, **kwargs)
    hooks.mark(output)
    return output


@final
class _SavedInput(torch.autograd.Function):
    """An identity that saves its input, so that a recompute has it to give."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return torch.empty_strided(out.shape, (0,) * out.dim(), dtype=out.dtype, device=out.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@final
class _Output:
    """A discarded output: how to get it again, and its values while somebody will ask again."""

    __slots__ = ("_node", "_num_left", "_value", "dtype", "num_users", "storage", "version")

    def __init__(self, output: Tensor, node: Any) -> None:
        self.storage: ReferenceType[torch.UntypedStorage] = ref(output.untyped_storage())
        self.dtype, self.version = output.dtype, version_of(output)
        self.num_users = 0
        self._node = node
        self._num_left = 0
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """Computed for the first user of a backward, and forgotten after the last."""
        if self._value is None:
            (value,) = self._node.saved_tensors
            self._value, self._num_left = value.detach(), self.num_users
        value, self._num_left = self._value, self._num_left - 1
        if self._num_left <= 0:
            self._value = None
        return value


@final
@dataclass(frozen=True, slots=True)
class _View:
    """What is kept of a saved tensor whose memory a discarded output owns."""

    output: _Output
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@final
class _Hooks:
    """Hooks on saved tensors that know which storages are computed again."""

    def __init__(self, outer: SavedTensorsHooks | None) -> None:
        self._outer = outer
        self._outputs: dict[int, _Output] = {}

    def mark(self, output: Tensor) -> None:
        """Have no tensor in the memory of this output saved."""
        storage = output.untyped_storage()
        if output.grad_fn is not None and storage.nbytes() > 0:
            self._outputs[storage_address(storage)] = _Output(output, output.grad_fn)

    def forget(self) -> None:
        """Let go of the outputs: the graph holds the hooks, and would so hold itself for ever."""
        self._outputs.clear()

    def pack(self, tensor: Tensor) -> Any:
        """A view of a discarded output, or what the hooks around make of the tensor."""
        output = self._output_of(tensor)
        if output is not None:
            output.num_users += 1
            return _View(output, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return tensor if self._outer is None else self._outer[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        """The reverse of `pack`."""
        if isinstance(packed, _View):
            value = packed.output.value()
            return value.as_strided(packed.size, packed.stride, packed.offset)
        value = packed if self._outer is None else self._outer[1](packed)
        return value

    def _output_of(self, tensor: Tensor) -> _Output | None:
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        output = self._outputs.get(storage_address(storage))
        if output is None or output.storage() is not storage:  # another one's memory by now
            return None
        same = (output.dtype, output.version) == (tensor.dtype, version_of(tensor))
        return output if same else None  # once changed in place it is saved as it then is
