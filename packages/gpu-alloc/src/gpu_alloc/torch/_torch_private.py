"""The one module that imports torch, and what it takes from torch's private parts.

Tested against torch 2.11 to 2.15: `UntypedStorage._cdata`, `torch.utils._python_dispatch`; against
2.15 `_cuda_customAllocator`, `_cuda_changeCurrentAllocator`.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def custom_allocator(malloc: int, free: int) -> Any:
    """torch's allocator that calls two C functions, given by their addresses."""
    return torch._C._cuda_customAllocator(malloc, free)


def make_current(allocator: Any) -> None:
    """Have torch take all of CUDA's memory from this allocator."""
    torch._C._cuda_changeCurrentAllocator(allocator)


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
        given = {storage_id(t) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._saw(t for t in _tensors(result) if storage_id(t) not in given)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
