"""Which parts of a stage are computed again in backward: all, some modules, or some operations.

A function with its activations kept in one of four ways has one of four forms:

    y = block(x)                                               # none: all is saved
    y = recompute(block, x)                                    # full: the inputs are
    y = selective_recompute(block, x, keep=MATRIX_PRODUCTS)    # and what these operations return
    with discard_outputs():                                    # all but the output of norm
        y = linear(discarded(norm, x))

and `recompute_modules` gives modules of a model one of these forms, by name:

    recompute_modules(model, {"layers.*.mlp": recompute, "layers.*.norm": discarded})

They nest, keep random numbers, replay routing (`moe_pipeline.recomputation.recomputing`), and split
backwards: the second forward runs once in I and never in W (`moe_pipeline.weight_grad.store`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tag, Tensor, nn

from moe_pipeline._checks import check_type
from moe_pipeline._torch_private import (
    GROUPED_MM_OPERATION,
    OpOverload,
    SavedTensorsHooks,
    TorchDispatchMode,
    detached,
    saved_tensors_hooks_in_force,
    version_of,
)
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.recomputation.recomputing import recompute

_Value = TypeVar("_Value")

_ATEN = torch.ops.aten

MATRIX_PRODUCTS: frozenset[Any] = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        GROUPED_MM_OPERATION,
    }
)
"""Operations that take long for what they return: `keep` these, and the rest is cheap again."""


def selective_recompute(
    function: Callable[..., _Value], *args: Any, keep: Collection[Any], **kwargs: Any
) -> _Value:
    """Return `function(*args, **kwargs)`; backward recomputes all but what `keep` returned.

    The results of the operations in `keep` are kept, whether a backward needs them or not, and the
    second forward takes them. Torch's `create_selective_checkpoint_contexts` wants to see every
    operation again, which a forward that replays its routing does not do.

    Args:
        function: as for `recompute`.
        args: of the function; tensors among them are kept for the backward.
        keep: operations such as `torch.ops.aten.mm.default`, or `MATRIX_PRODUCTS`. Experts of this
            package run inside of functions of their own and are recomputed whole, unless their
            implementation is "grouped_mm". No operations by which routing is decided, such as
            topk: they are not repeated.
        kwargs: of the function.

    Raises:
        ValueError: an operation that writes into an argument, whose result cannot be kept.
        TypeError: something else than an overload of an operation.
        RuntimeError: in backward, when a kept result was changed in place, or the second forward
            calls a kept operation otherwise than the first.
    """
    check_type("keep", keep, Collection, hint=" of operations")
    for operation in keep:
        _check_operation(operation)
    # Asked here, as within the recompute its own hooks are in force.
    kept = _KeptResults(frozenset(keep), saved_tensors_hooks_in_force())
    runs = iter([_Keep(kept)])

    def run(*given: Any, **named: Any) -> _Value:
        with next(runs, _Take(kept)):
            return function(*given, **named)

    return recompute(run, *args, **kwargs)


def recompute_modules(
    module: nn.Module, choose: Mapping[str, Callable[..., Any]]
) -> "RecomputedModules":
    """Have the chosen modules compute their forward in another way, until `remove()`.

    Args:
        module: a stage, a model or a layer. Parameters keep their names.
        choose: for a name (`layers.3.mlp`) or pattern (`layers.*.mlp`, where `*` stands within one
            name) of modules, how to call them: `recompute`, `discarded`,
            `partial(selective_recompute, keep=...)`, or any function of
            (function, *args, **kwargs).

    Raises:
        ValueError: a pattern fits no module, or two fit the same one.
    """
    names = dict(module.named_modules())
    chosen: dict[str, Callable[..., Any]] = {}
    for pattern, way in choose.items():
        check_type(f"choose[{pattern!r}]", way, Callable)  # type: ignore[arg-type]  # a class
        fitting = [name for name in names if name and _fits(name, pattern)]
        if not fitting:
            raise MoEValueError(
                f"pattern {pattern!r} fits no module of {type(module).__name__}; its modules are "
                f"{', '.join(sorted(names)[1:9])}, ..."
            )
        twice = [name for name in fitting if name in chosen]
        if twice:
            raise MoEValueError(
                f"module {twice[0]!r} fits {pattern!r} and a pattern before; drop one"
            )
        chosen.update(dict.fromkeys(fitting, way))
    return RecomputedModules([(names[name], way) for name, way in chosen.items()])


@final
class RecomputedModules:
    """Modules whose forward runs in another way; `remove()` gives them their own back."""

    def __init__(self, chosen: list[tuple[nn.Module, Callable[..., Any]]]) -> None:
        self._modules = [module for module, _ in chosen]
        for module in self._modules:
            if isinstance(module.__dict__.get("forward"), _Forward):
                raise MoEValueError(
                    f"a {type(module).__name__} is recomputed already; remove() that first"
                )
        for module, way in chosen:
            module.__dict__["forward"] = _Forward(module, way, module.__dict__.get("forward"))

    def remove(self) -> None:
        """Undo `recompute_modules`; again does nothing."""
        for module in self._modules:
            mine = module.__dict__.get("forward")
            if isinstance(mine, _Forward):
                del module.__dict__["forward"]
                if mine.before is not None:
                    module.__dict__["forward"] = mine.before
        self._modules = []


@final
@dataclass(slots=True, eq=False)
class _Forward:
    """A module's forward in another way; copies with its module, also in `infer_shapes`."""

    module: nn.Module
    way: Callable[..., Any]
    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.way(self.own, *args, **kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward as it was."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _check_operation(operation: Any) -> None:
    if not isinstance(operation, OpOverload):
        raise MoETypeError(
            f"keep holds {operation!r}; give overloads of operations such as "
            "torch.ops.aten.mm.default"
        )
    name, overload = operation.name().partition(".")[::2]
    if name.endswith("_") or "out" in overload:
        raise MoEValueError(
            f"operation {operation} writes into an argument, so its result cannot be kept; leave "
            "it out of keep"
        )


def _fits(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


class _Part(NamedTuple):
    """A tensor that a kept operation returned, or what the hooks around made of it."""

    version: int
    packed: Any


class _Result(NamedTuple):
    """What a kept operation returned."""

    shapes: tuple[torch.Size, ...]  # of its arguments
    parts: list[Any]  # a `_Part` for each tensor, all else as it is
    several: type[Any] | None  # tuple or list, where it did not return one tensor
    random: tuple[torch.device, Tensor] | None  # state of the generator that it drew from


@final
class _KeptResults:
    """The results of one first forward, by operation, in order."""

    def __init__(self, keep: frozenset[Any], outer: SavedTensorsHooks | None) -> None:
        self.keep, self.outer = keep, outer
        self.results: dict[Any, list[_Result]] = {}

    def put(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        """Keep a result."""
        several = type(out) if isinstance(out, tuple | list) else None
        outs = out if several else (out,)
        parts = [self._packed(part) for part in outs]
        random = _random_state(outs) if Tag.nondeterministic_seeded in operation.tags else None
        result = _Result(_shapes(args), parts, several, random)
        self.results.setdefault(operation, []).append(result)

    def take(self, operation: Any, args: tuple[Any, ...], index: int) -> Any:
        """The result of the first forward's call `index` of the operation."""
        results = self.results.get(operation, [])
        if index >= len(results) or results[index].shapes != _shapes(args):
            raise RuntimeError(
                f"selective_recompute: call {index + 1} of {operation} in the second forward is "
                "not one of the first; the function has to make the same calls, or leave the "
                "operation out of keep"
            )
        result = results[index]
        if result.random is not None:  # what is drawn after it has to be what was
            _set_random_state(*result.random)
        parts = [self._unpacked(operation, part) for part in result.parts]
        return parts[0] if result.several is None else result.several(parts)

    def _packed(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        part = detached(part)
        return _Part(version_of(part), part if self.outer is None else self.outer[0](part))

    def _unpacked(self, operation: Any, part: Any) -> Any:
        if not isinstance(part, _Part):
            return part
        if self.outer is not None:
            return detached(self.outer[1](part.packed))
        if version_of(part.packed) != part.version:
            raise RuntimeError(
                f"selective_recompute: what {operation} returned was changed in place, so it "
                "cannot be kept; leave the operation out of keep, or do not change its result"
            )
        return detached(part.packed)


def _random_state(outs: Iterable[Any]) -> tuple[torch.device, Tensor]:
    """The device of the first tensor, and the state of its default generator."""
    device = next((out.device for out in outs if isinstance(out, Tensor)), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return device, state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _shapes(args: tuple[Any, ...]) -> tuple[torch.Size, ...]:
    return tuple(arg.shape for arg in args if isinstance(arg, Tensor))


@final
class _Keep(TorchDispatchMode):
    """The first forward: keeps results."""

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._kept = kept

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._kept.keep:
            self._kept.put(func, args, out)
        return out


@final
class _Take(TorchDispatchMode):
    """The second forward: takes them."""

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self._kept = kept
        self._num_calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in self._kept.keep:
            return func(*args, **(kwargs or {}))
        index = self._num_calls[func]
        self._num_calls[func] += 1
        return self._kept.take(func, args, index)
