import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.testing import assert_close

from moe_pipeline._torch_private import (
    GROUPED_MM_OPERATION,
    OpOverload,
    TorchDispatchMode,
    detached,
    run_backward,
    saved_tensors_hooks_in_force,
    version_of,
)


def test_run_backward_does_what_torchs_backward_does(seed):
    x = torch.randn(3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)
    for inputs in ((), (x,)):
        y = x * w
        run_backward(
            [get_gradient_edge(y)],
            [torch.ones(3)],
            retain_graph=False,
            create_graph=False,
            inputs=inputs,
        )
    assert_close(x.grad, 2 * w.detach())
    assert_close(w.grad, x.detach())


def test_the_innermost_hooks_are_told():
    def pack(tensor):
        return tensor

    assert saved_tensors_hooks_in_force() is None
    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, pack):
        assert saved_tensors_hooks_in_force() == (pack, pack)


def test_versions_count_changes_also_through_a_detached_tensor():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                seen.append(detached(out))
            return out

    with Mode():
        y = torch.exp(torch.zeros(2, requires_grad=True))
    before = version_of(seen[0])
    with torch.no_grad():
        y.add_(1)
    assert version_of(seen[0]) == before + 1
    assert not seen[0].requires_grad


def test_the_grouped_product_is_the_operation_that_torch_calls():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    called = []
    with Mode():
        F.grouped_mm(torch.ones(2, 8), torch.ones(1, 8, 8), offs=torch.tensor([2]).int())
    assert GROUPED_MM_OPERATION in called
    assert isinstance(GROUPED_MM_OPERATION, OpOverload)


def test_a_gradient_of_another_shape_is_refused_by_the_engine():
    y = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"shape|size"):
        run_backward([y], [torch.ones(4)], retain_graph=False, create_graph=False, inputs=())
