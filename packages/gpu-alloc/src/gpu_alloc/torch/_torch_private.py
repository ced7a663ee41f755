"""The one module that imports torch, and what it takes from torch's private parts.

Tested against torch 2.11 to 2.15: `UntypedStorage._cdata` and that its `resize_` may be replaced,
`torch.utils._python_dispatch`, `torch._subclasses`, `torch._ops`, an operator's `_schema`; against
2.15 `_cuda_customAllocator`, `_cuda_changeCurrentAllocator`.
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
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
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
    """The tensors in nested lists, tuples and dicts; of sparse ones, and of those that only wrap
    others (DTensor, jagged), those that have their memory.

    mkldnn's are left out: torch shows nobody the memory of theirs.
    """
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [part for leaf in leaves for part in _with_storages(leaf)]


def _with_storages(tensor: Tensor) -> tuple[Tensor, ...]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return tuple(tensors_in([getattr(tensor, name) for name in names]))
    layout = tensor.layout
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return () if tensor.is_mkldnn else (tensor,)


@contextmanager
def on_resize(saw: "_Tensors", resized: "_Storage") -> Iterator[None]:
    """Inside, `resized` is told of storages once they are resized, and whether in a thread in which
    `saw` is told of what operators make: `UntypedStorage.resize_` is no operator.

    Other code that replaces the method does so inside, or all of the time.
    """
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size_bytes: int) -> Any:
        before = self.nbytes()
        result = resize(self, size_bytes)
        if self.nbytes() != before:
            modes = _get_current_dispatch_mode_stack()
            resized(self, any(isinstance(m, OutputsMode) and m.saw == saw for m in modes))
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def storage_id(tensor: Tensor) -> int:
    """A number that a storage keeps while it lives, whichever tensor shows it."""
    return int(tensor.untyped_storage()._cdata)


_Tensors = Callable[[Iterable[Tensor]], None]
_Storage = Callable[[torch.UntypedStorage, bool], None]


class OutputsMode(TorchDispatchMode):
    """Hands the tensors that each operator makes to a function, storages it resized to another."""

    supports_higher_order_operators = True

    def __init__(self, saw: _Tensors, resized: _Storage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self.saw, self._resized = saw, resized

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then show what it made or, where it writes, what it resized."""
        given = tensors_in((args, kwargs))
        if isinstance(func, OpOverload) and _writes(func._schema.returns):
            storages = [tensor.untyped_storage() for tensor in given]
            sizes = [storage.nbytes() for storage in storages]
            result = func(*args, **(kwargs or {}))
            for storage, size in zip(storages, sizes, strict=True):
                if storage.nbytes() != size:
                    self._resized(storage, True)
            return result  # of `out` a fake mode returns another tensor
        result = func(*args, **(kwargs or {}))
        # An output may be a view of memory that was there before the recording, but for that of
        # `torch.tensor`, which comes from no other operator.
        is_new = func is torch.ops.aten.lift_fresh.default
        known = set(map(storage_id, () if is_new else given))
        self.saw(t for t in tensors_in(result) if storage_id(t) not in known)
        return result


def _writes(places: Iterable[Any]) -> bool:
    """Whether an operator writes into one of these arguments or returns of its schema."""
    return any(place.alias_info is not None and place.alias_info.is_write for place in places)
