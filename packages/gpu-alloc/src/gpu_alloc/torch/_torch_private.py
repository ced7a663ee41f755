"""The one module that imports torch, and what it takes from torch's private parts.

Tested against torch 2.11 to 2.15: `UntypedStorage._cdata` and that its `resize_` may be replaced,
`torch.utils._python_dispatch`, `torch._subclasses`, an operator's `_schema`; against 2.15
`_cuda_customAllocator`, `_cuda_changeCurrentAllocator`.
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}; gpu_alloc.torch needs PyTorch 2.11 or later: pip install torch",
        name=error.name,
    ) from None

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    return _writes(func._schema.arguments[:1])


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts; of sparse ones those that have their memory.

    mkldnn's are left out: torch shows nobody the memory of theirs.
    """
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [part for leaf in leaves for part in _with_storages(leaf)]


def _with_storages(tensor: Tensor) -> tuple[Tensor, ...]:
    layout = tensor.layout
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return () if tensor.is_mkldnn else (tensor,)


@contextmanager
def on_resize(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, storages are told of once they are resized: `UntypedStorage.resize_` is no operator.

    Other code that replaces the method does so inside, or all of the time.
    """
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size_bytes: int) -> Any:
        result = resize(self, size_bytes)
        tell(self)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def storage_id(tensor: Tensor) -> int:
    """A number that a storage keeps while it lives, whichever tensor shows it."""
    return int(tensor.untyped_storage()._cdata)


class OutputsMode(TorchDispatchMode):
    """Hands the tensors that each operator makes to a function, those it changed to another."""

    def __init__(
        self,
        saw: Callable[[Iterable[Tensor]], None],
        changed: Callable[[Iterable[Tensor]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._saw, self._changed = saw, changed

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then show what it made or, where it writes, what it was given."""
        given = tensors_in((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if _writes(func._schema.returns):
            self._changed(given)  # of `out` a fake mode returns another tensor
            return result
        # An output may be a view of memory that was there before the recording.
        known = set(map(storage_id, given))
        self._saw(t for t in tensors_in(result) if storage_id(t) not in known)
        return result


def _writes(places: Iterable[Any]) -> bool:
    """Whether an operator writes into one of these arguments or returns of its schema."""
    return any(place.alias_info is not None and place.alias_info.is_write for place in places)
