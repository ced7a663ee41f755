"""The only module that uses torch's private API: looking at what every operator returns.

torch documents dispatch modes but exports them from modules with an underscore; they are the same
in torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        # An output may be a view of memory that was there before the recording.
        given = {storage_id(t) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._saw(t for t in _tensors(result) if storage_id(t) not in given)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
