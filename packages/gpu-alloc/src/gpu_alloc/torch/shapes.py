"""A torch program run on shapes: what it allocates is known, and next to none of it is.

Floating tensors are fake, so that a step of any size runs on any machine; integers (tokens, choices
of experts, row counts) and float64 are real, so that what a program decides by them, it decides as
ever. Where a program reads a floating number it gets 0, and where it asks which numbers are largest
(`topk`, `sort`), row j gets j, j + 1, ... modulo their number: what is chosen is chosen evenly.

Invariant: a tensor has the shape, dtype and storage size that it would have; nothing of its content
is told.

    with ShapesOnly(), TraceRecorder() as recorder:
        model = Decoder()
        model(tokens).sum().backward()
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

from gpu_alloc.torch._torch_private import (
    FakeTensor,
    TorchDispatchMode,
    fake_mode,
    is_changed_in_place,
    tensors_in,
    torch,
    tree_map,
)

_aten = torch.ops.aten
_FACTORIES = frozenset(
    (_aten.empty, _aten.zeros, _aten.ones, _aten.rand, _aten.randn, _aten.empty_strided)
)
_CHOOSING = frozenset((_aten.topk.default, _aten.sort.default, _aten.sort.stable))


@final
class ShapesOnly(TorchDispatchMode):
    """A context in which floating tensors have no memory; see the module's docstring.

    Tensors from before may be used; they are not changed. Not for several threads at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._fake = fake_mode()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, on shapes if a tensor without memory has part in it."""
        named = dict(kwargs or {})
        given = tensors_in((args, named))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return self._on_shapes(func, args, named)
        if not given and _makes_floats(func, args, named):
            named.pop("generator", None)
            with self._fake:
                return func(*args, **named)
        return func(*args, **named)

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            return 0.0 if args[0].dtype.is_floating_point else 0
        if func is _aten.equal.default:
            return False
        changed = tensors_in(args[0]) if is_changed_in_place(func) else []
        if changed and not any(isinstance(tensor, FakeTensor) for tensor in changed):
            # Integers or float64, of whose new content nothing is known.
            return args[0] if func._schema.returns else None
        kwargs.pop("generator", None)
        args, kwargs = tree_map(_without_graph, (args, kwargs))
        with self._fake:
            result = func(*args, **kwargs)
        if func in _CHOOSING:
            values, indices = result
            return values, _evenly(indices, args[0].shape, _dim_of(func, args, kwargs))
        return result


def _without_graph(value: Any) -> Any:
    """A real tensor as one that fake ones are made of without a look at its gradient."""
    is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return value.detach() if is_real and value.requires_grad else value


def _makes_floats(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator without tensors makes one of floating numbers, other than float64."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        numbers = [arg for arg in args if isinstance(arg, (int, float))]
        is_full = func.overloadpacket is _aten.full
        if func.overloadpacket not in _FACTORIES and not (is_full and type(args[1]) is float):
            return func.overloadpacket is _aten.arange and any(map(_is_float, numbers))
        dtype = torch.get_default_dtype()
    return bool(dtype.is_floating_point) and dtype != torch.float64


def _is_float(number: object) -> bool:
    return type(number) is float


def _dim_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Along which dim an operator chooses."""
    names = [argument.name for argument in func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | dict(kwargs)
    return int(bound.get("dim", -1))


def _evenly(indices: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Real indices in the place of fake ones: row j gets j, j + 1, ... modulo their number."""
    if not indices.dim():
        return torch.zeros((), dtype=indices.dtype)
    *rows, chosen = indices.movedim(dim, -1).shape
    first = torch.arange(math.prod(rows)).view(*rows, 1)
    return ((first + torch.arange(chosen)) % shape[dim]).movedim(-1, dim).contiguous()
