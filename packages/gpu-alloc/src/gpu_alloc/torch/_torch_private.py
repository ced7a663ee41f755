"""The one module that imports torch, and what it takes from torch's private parts.

Tested against torch 2.11 to 2.15: `UntypedStorage._cdata`, `torch.utils._python_dispatch`,
`torch._subclasses`, an operator's `_schema`; against 2.15 `_cuda_customAllocator`,
`_cuda_changeCurrentAllocator`.
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; gpu_alloc.torch needs PyTorch 2.11 or later: pip install torch",
        name=error.name,
    ) from None

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map as tree_map


def custom_allocator(malloc: int, free: int) -> Any:
    """torch's allocator that calls two C functions, given by their addresses."""
    return torch._C._cuda_customAllocator(malloc, free)


def make_current(allocator: Any) -> None:
    """Have torch take all of CUDA's memory from this allocator."""
    torch._C._cuda_changeCurrentAllocator(allocator)


def fake_mode() -> FakeTensorMode:
    """A mode in which operators make fake tensors, of real ones too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_changed_in_place(func: Any) -> bool:
    """Whether an operator writes into its first argument."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and bool(alias.is_write)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """A number that a storage keeps while it lives, whichever tensor shows it."""
    return int(tensor.untyped_storage()._cdata)


class OutputsMode(TorchDispatchMode):
    """Hands the tensors that each operator returns to a function."""

    def __init__(self, saw: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._saw = saw

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then show what it returned and was not given."""
        # An output may be a view of memory that was there before the recording.
        given = {storage_id(t) for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._saw(t for t in tensors_in(result) if storage_id(t) not in given)
        return result
