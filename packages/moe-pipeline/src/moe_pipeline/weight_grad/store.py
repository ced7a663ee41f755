"""A stage's backward split in two: input gradients (I) now, weight gradients (W) from a store.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) fill idle time with W, so I must leave W out and
W must not repeat what I did. Here the forward remembers a store, and a backward puts the weight
gradients there instead of computing them:

    store = WeightGradStore()
    with split_backward(store):
        loss = stage(x)
    with store.deferring():      # I: input gradients; the weights' wait in the store
        loss.backward()
    store.run()                  # W

Outside of `deferring()` the same graph gives all gradients at once; run that in `store.at_once()`
if the stage calls `torch.utils.checkpoint` by itself. Take a store for each stage and microbatch.

What is split: `F.linear` (so `nn.Linear`), `x @ weight`, `torch.mm`, `torch.addmm` and
`F.grouped_mm` by a weight that is a leaf or its transpose; all experts, shared experts and routers
of this package; functions that use `moe_pipeline.weight_grad.deferred`. Everything else is computed
in I: biases, norms, embeddings, convolutions, weights that were computed (`weight.to(...)`), what
torch calls from within (`F.multi_head_attention_forward`) and what torch.func transforms. What is
split can be differentiated once.

Invariant: I and W together do the matrix products of one backward, each once, and leave the
gradients that it would leave. Until W the store keeps for each product its input and the gradient
of its output (`held_bytes`), nothing else.

A backward must be one of `torch.autograd.backward` without `inputs=`, which would leave out what
does not lead to an input. W runs on the current CUDA stream, which should be that of the forward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from moe_pipeline._torch_private import run_backward
from moe_pipeline.weight_grad.accumulation import InPlaceAccumulation
from moe_pipeline.weight_grad.deferred import Splitting, WorkList, current_splitting, name_of
from moe_pipeline.weight_grad.split_linear import REPLACEMENTS


@final
class WeightGradStore:
    """Weight gradients of backwards that have run, to be computed later; see the module.

    Args:
        accumulation: of the gradients of weights that have no accumulation of their own (experts
            may); None: through autograd.
        beside: a store of another microbatch of the stage, which has prepared the weights already.
    """

    def __init__(
        self,
        accumulation: InPlaceAccumulation | None = None,
        *,
        beside: "WeightGradStore | None" = None,
    ) -> None:
        others: WorkList | None = None if beside is None else beside._work
        self._work: WorkList = WorkList(accumulation, beside=others)

    def __len__(self) -> int:
        """How many pieces of work wait."""
        return len(self._work)

    @property
    def held_bytes(self) -> int:
        """Bytes of the storages that waiting work keeps alive: inputs and output gradients."""
        return self._work.held_bytes

    def put(
        self,
        work: Callable[[], None],
        *,
        name: str | None = None,
        held: Sequence[Tensor] = (),
    ) -> None:
        """Have `run` call `work()`, after everything that was put before.

        Args:
            work: anything. For the gradient of a weight use
                `moe_pipeline.weight_grad.deferred.defer`.
            name: for errors; None: that of the function.
            held: tensors that `work` keeps alive, to be counted in `held_bytes`.
        """
        self._work.add(lambda *_: work(), tuple(held), name=name or name_of(work))

    def run(self) -> None:
        """Run and forget all work in order (W); an error says which, and forgets the rest."""
        self._work.run()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within it backwards of graphs made under `split_backward(self)` leave W here (I)."""
        work = self._work
        before, work.deferring = work.deferring, True
        work.num_backwards += 1
        try:
            with self.whole():
                yield
        finally:
            work.deferring = before

    def whole(self) -> AbstractContextManager[None]:
        """For a whole backward; `at_once`, but only if the forward may run again within it."""
        return self.at_once() if self._work.may_repeat else nullcontext()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a whole backward, where the stage calls `torch.utils.checkpoint` by itself.

        Without this its second forward would run unsplit, save other tensors than the first, and
        raise torch's `CheckpointError`. `moe_pipeline.recompute` needs no such help.
        """
        with _SplitMode(Splitting(self._work)):
            yield


@contextmanager
def split_backward(store: WeightGradStore) -> Iterator[None]:
    """Within it forwards remember the store for the weight gradients of their backward."""
    with store.at_once():
        yield


def current_split() -> Callable[[], AbstractContextManager[object]] | None:
    """What puts the split in force here in force again, in any thread; None: there is none."""
    splitting = current_splitting()
    return None if splitting is None else partial(_SplitMode, splitting)


@final
class _SplitMode(TorchFunctionMode):
    """Replaces torch's linear functions by ours, and tells who asks which splitting is in force."""

    def __init__(self, splitting: Splitting) -> None:
        super().__init__()
        self._splitting = splitting

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self._splitting, func, *args, **(kwargs or {}))


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,  # torch's old name of `grad_tensors`
    inputs: Any = None,
) -> None:
    """Torch's own is called without the mode that a forward within it, which runs again, needs."""
    roots, gradients = _as_tuple(tensors), grad_variables if grad_tensors is None else grad_tensors
    given = (None,) * len(roots) if gradients is None else _as_tuple(gradients)
    run_backward(
        roots,
        [_gradient_of(root, gradient) for root, gradient in zip(roots, given, strict=True)],
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
        inputs=() if inputs is None else _as_tuple(inputs),
    )


def _tensor_backward(
    splitting: Splitting,
    function: object,
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    with _SplitMode(splitting):
        _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _autograd_backward(splitting: Splitting, function: object, *args: Any, **named: Any) -> None:
    with _SplitMode(splitting):
        _backward(*args, **named)


_HANDLERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **REPLACEMENTS,
    current_splitting: lambda splitting, function: splitting,
    Tensor.backward: _tensor_backward,
    torch.autograd.backward: _autograd_backward,
}


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, Tensor | GradientEdge) else tuple(given)


def _gradient_of(root: Tensor | GradientEdge, gradient: Tensor | None) -> Tensor | None:
    if gradient is not None or not isinstance(root, Tensor) or not root.requires_grad:
        return gradient
    if root.numel() != 1:
        raise RuntimeError(
            f"backward of a tensor of shape {tuple(root.shape)} needs a gradient; give one, or "
            "reduce it to a scalar"
        )
    return torch.ones_like(root)
