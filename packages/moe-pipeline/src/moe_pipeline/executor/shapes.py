"""Shapes and dtypes along a pipeline, found without running a forward.

The stages run on the `meta` device, where tensors have a shape and no content: on copies of the
modules, so that parameters, buffers, counters and lists of the real ones stay as they are, and no
random number is drawn. So a whole pipeline is checked before a job starts, on one process, with
stages that may themselves have been built on `meta`.

    shapes = infer_shapes([stage_0, stage_1], (torch.empty(8, 512, dtype=torch.int64),))
    shapes[0]                                # (TensorShape((8, 512, 64), torch.float32, True),)

A layer whose work depends on values (who is routed where) cannot run so; `stand_ins` say what it
returns instead.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.executor.pytrees import map_tensors
from moe_pipeline.executor.stage_io import StageOutput

StandIns = Mapping[type[nn.Module], Callable[..., object]]


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What is known of a tensor without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool = False


def infer_shapes(
    stages: Sequence[nn.Module],
    inputs: tuple[Any, ...],
    *,
    target: object | None = None,
    stand_ins: StandIns | None = None,
) -> list[tuple[Any, ...]]:
    """What each stage passes to the next for one microbatch.

    Args:
        stages: all stages of the pipeline, in order, on any device.
        inputs: of the first stage; only shapes and dtypes matter.
        target: given to every stage, as in a step; tensors directly in a tree of it go to `meta`.
        stand_ins: by class of module what to call instead of its forward, as
            `stand_in(module, *args, **kwargs)`.

    Returns:
        For each stage the tree of its outputs with a `TensorShape` for each tensor; the last one's
        is usually empty.

    Raises:
        TypeError: a stage is no `nn.Module`, so that its state could not be kept out of it; or one
            does not return a `StageOutput`.
        ValueError: a stage cannot run on what the one before returns; says what that is.
    """
    shadows = _Shadows(stand_ins or {})
    passed: tuple[Any, ...] = map_tensors(_to_meta, tuple(inputs))
    target = shadows.of(target)
    found = []
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise MoETypeError(f"stage {number} is a {type(stage).__name__}; give an nn.Module")
        passed = _run(number, shadows.of(stage), passed, target)
        found.append(map_tensors(_shape_of, passed))
    return found


def _run(
    number: int, stage: Any, inputs: tuple[Any, ...], target: object | None
) -> tuple[Any, ...]:
    try:
        with torch.device("meta"), torch.enable_grad(), _WholeIds():
            output = stage(*inputs, target=target)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        source = f"what stage {number - 1} returns" if number else "the inputs"
        raise MoEValueError(
            f"stage {number} cannot run on {source}, {map_tensors(_shape_of, inputs)}: {error}"
        ) from error
    if not isinstance(output, StageOutput):
        raise MoETypeError(f"stage {number} must return a StageOutput, got {type(output).__name__}")
    return output.tensors


def _shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _to_meta(tensor: Tensor) -> Tensor:
    moved = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


@final
class _WholeIds(TorchFunctionMode):
    """Refuses ids that are no integers, which `meta` takes on torch 2.11."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run a torch function of a stage."""
        ids = args[0] if func is F.embedding and args else None
        if isinstance(ids, Tensor) and ids.dtype not in (torch.int32, torch.int64):
            raise MoETypeError(f"an embedding got ids of {ids.dtype}; give int64 or int32")
        return func(*args, **(kwargs or {}))


@final
class _StandIn(nn.Module):
    """In the place of a module that cannot run on `meta`."""

    def __init__(self, function: Callable[..., object], module: nn.Module) -> None:
        super().__init__()
        self._call: Callable[..., object] = functools.partial(function, module)

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """Whatever stands in for the module's own."""
        return self._call(*args, **kwargs)


@final
class _Shadows:
    """Copies of modules and of what they hold, with all tensors on `meta`.

    Containers, dataclasses and modules are copied, what is shared stays shared; anything else
    (process groups, functions) is used as it is.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._made: dict[int, tuple[object, Any]] = {}  # with the original, which keeps its id

    def of(self, value: object) -> Any:
        """The copy of a value, always the same one."""
        if id(value) not in self._made:
            self._made[id(value)] = (value, self._make(value))
        return self._made[id(value)][1]

    def _make(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _to_meta(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if type(value) in (list, set, tuple):
            return type(value)(self.of(item) for item in value)  # type: ignore[attr-defined, call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.of(item) for item in value))
        if isinstance(value, dict):
            shadow = copy.copy(value)
            shadow.update({key: self.of(item) for key, item in value.items()})
            return shadow
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._record(value)
        return value

    def _record(self, value: Any) -> Any:
        shadow = copy.copy(value)
        for field in dataclasses.fields(value):
            # gate: setattr - `replace` would check again, and refuse fields that are not for init
            object.__setattr__(shadow, field.name, self.of(getattr(value, field.name)))
        return shadow

    def _module(self, module: nn.Module) -> nn.Module:
        for kind, function in self._stand_ins.items():
            if isinstance(module, kind):
                return _StandIn(function, module)
        shadow = copy.copy(module)
        self._made[id(module)] = (module, shadow)  # a part may know the whole
        shadow.__dict__ = {name: self.of(item) for name, item in module.__dict__.items()}
        return shadow
