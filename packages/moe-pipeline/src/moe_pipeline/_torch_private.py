"""The private torch names that this package needs, in one place that an upgrade has to check.

The same in torch 2.11 to 2.15.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import maybe_current_level as maybe_current_level
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import get_backend_config
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# What a torch function mode and what a dispatch mode see of `F.grouped_mm`.
GROUPED_MM = torch._grouped_mm
_Function = TypeVar("_Function", bound=Callable[..., Any])
GROUPED_MM_OPERATION = torch.ops.aten._grouped_mm.default


def not_compiled(fn: _Function) -> _Function:
    """Let torch.compile leave a function out, as `torch.compiler.disable` does, which imports the
    compiler.
    """
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, skip)
    return fn


def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor | None],
    *,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge],
) -> None:
    """What `torch.autograd.backward` does in the end.

    Torch puts torch function modes aside for the body of a public function, so that a forward that
    runs again in that backward would not see them; the engine hands on those in force here.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def is_asked_for(node: Node) -> bool:
    """Whether the backward that runs now goes to a node; True where none runs."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._will_engine_execute_node(node))


def backend_by_device(group: ProcessGroup) -> dict[str, str]:
    """By type of device the name of the group's backend for it."""
    pairs = (entry.split(":", 1) for entry in get_backend_config(group).split(","))
    return dict((kind, backend) for kind, backend in pairs)


def address(tensor: Tensor) -> int:
    """Where a tensor begins; a fake one, which is nowhere, has a number as if it were somewhere."""
    if isinstance(tensor, FakeTensor):
        first = int(tensor.storage_offset()) * tensor.itemsize
        return storage_address(tensor.untyped_storage()) + first
    return tensor.data_ptr()


def storage_address(storage: torch.UntypedStorage) -> int:
    """Where a storage begins; one without memory has a number that no other has while it lives."""
    return int(storage._cdata) if storage.device.type == "meta" else storage.data_ptr()


SavedTensorsHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def saved_tensors_hooks_in_force() -> SavedTensorsHooks | None:
    """The innermost `torch.autograd.graph.saved_tensors_hooks`, which alone is asked; or None."""
    hooks: SavedTensorsHooks | None = _top_saved_tensors_default_hooks(False)
    return hooks


def detached(tensor: Tensor) -> Tensor:
    """Within a dispatch mode: a tensor without graph, whose changes in place are counted."""
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_of(tensor: Tensor) -> int:
    """How often the tensor's memory was changed in place, as autograd counts."""
    return tensor._version


def has_own_call(module: torch.nn.Module) -> bool:
    """Whether a call of a module does more than its class's forward: hooks, or another forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks) or "forward" in vars(module)


def has_run(module: Any) -> bool:
    """Whether an `FSDPModule` has had a forward, without which it has nothing to reset."""
    return module._get_fsdp_state()._is_root is not None


def has_hooks(leaf: Tensor) -> bool:
    """Whether somebody has registered a hook for the gradient of a leaf, by its own methods."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
