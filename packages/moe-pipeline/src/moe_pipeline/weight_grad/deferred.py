"""Deferred weight gradients: which weight, what to compute, and how it gets its gradient.

Autograd cannot leave a weight's gradient for later: a function that returns None for a weight has
that weight's hooks called without a gradient. So inside `split_backward` a function is given an
*alias* of a weight, which is no part of the weight's graph, and a `DeferredWeightGrad` that says
whose alias it is. A gradient of the alias is delivered to the weight.

How an autograd function of your own takes part:

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, deferred):
            ctx.save_for_backward(x, weight)
            ctx.deferred = deferred
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_weight = defer(ctx.deferred, lambda x, grad: x.t() @ grad, x, grad)
            return grad @ weight.t(), grad_weight, None

    y = Scaled.apply(x, *deferrable(weight))

Invariant: deferred work runs once, in order, and its gradient reaches the weight as autograd
delivers one: added to `grad`, once for all uses of a weight in one backward, hooks called. Only
`torch.autograd.grad` with respect to the weight is left out: the graph does not lead there.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import handle_torch_function, has_torch_function

from moe_pipeline._torch_private import (
    address,
    has_hooks,
    is_asked_for,
    maybe_current_level,
    saved_tensors_hooks_in_force,
    storage_address,
)
from moe_pipeline.weight_grad.accumulation import (
    PLAIN_TYPES,
    GradTarget,
    InPlaceAccumulation,
    fits,
    is_observed,
    node_of_leaf,
)
from moe_pipeline.weight_grad.delivery import Ready, deliver


class _Entry(NamedTuple):
    """One piece of work, with the tensors that it keeps alive."""

    work: Callable[..., Tensor | None]
    held: tuple[Tensor, ...]
    weight: "DeferredWeightGrad | None"  # whose gradient it returns; None: it returns nothing
    backward: int  # of which backward: uses of a weight in one are summed first
    name: str | None  # None: that of the function
    can_add: bool  # whether the work adds to a gradient that it is given as `to`


class _Known(NamedTuple):
    """What a work list knows of a weight."""

    leaf: Tensor
    alias: Tensor
    node: Node  # of the alias
    is_observed: bool


@final
class WorkList:
    """Deferred work, in order. `WeightGradStore` is the part that users see.

    Attributes:
        deferring: whether a backward that runs now puts its weight gradients here.
        num_backwards: how many such backwards there were.
        may_repeat: whether the backward may run a part of the forward again, which is then to be
            split: something was saved by way of hooks, or computed without grad mode.
        accumulation: of the gradients of weights; None: autograd's.
        aliases: by a weight's id what is known of it, its alias first of all.
    """

    def __init__(
        self,
        accumulation: InPlaceAccumulation | None = None,
        *,
        beside: "WorkList | None" = None,
    ) -> None:
        self.accumulation = accumulation
        self.aliases: dict[int, _Known] = {} if beside is None else beside.aliases
        self.deferring = False
        self.num_backwards = 0
        self.may_repeat = False
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        work: Callable[..., Tensor | None],
        held: tuple[Tensor, ...],
        *,
        weight: "DeferredWeightGrad | None" = None,
        name: str | None = None,
        can_add: bool = False,
    ) -> None:
        """Defer `work(*held)`, whose result is the gradient of the weight."""
        # Detached: a saved tensor comes with its graph, which would stay alive.
        kept = tuple([tensor.detach() for tensor in held])
        self._entries.append(_Entry(work, kept, weight, self.num_backwards, name, can_add))

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages that the entries keep alive."""
        storages = [t.untyped_storage() for entry in self._entries for t in entry.held]
        return sum({storage_address(each): each.nbytes() for each in storages}.values())

    @torch.no_grad()
    def run(self) -> None:
        """Run and forget everything that is here now; after an error nothing is left either."""
        entries, self._entries = self._entries, deque()
        left = Counter(_sum_key(entry) for entry in entries)
        sums: dict[tuple[int, int], Tensor] = {}
        ready = Ready()
        position, total = 0, len(entries)
        while entries:
            entry, position = entries.popleft(), position + 1
            try:
                grad = _gradient(entry)
                key = _sum_key(entry)
                left[key] -= 1
                if grad is not None:
                    sums[key] = sums[key] + grad if key in sums else grad
                del grad
                if entry.weight is not None and left[key] == 0 and key in sums:
                    ready.add(entry.weight.leaf, sums.pop(key))
            except Exception as error:
                error.add_note(f"in deferred work {position} of {total}: {_told(entry)}")
                raise
        ready.deliver()


def name_of(work: Callable[..., object]) -> str:
    """Of a function, or of the one inside a partial, whose repr would print tensors."""
    inner = getattr(work, "func", work)
    return str(getattr(inner, "__qualname__", type(work).__name__))


def _sum_key(entry: _Entry) -> tuple[int, int]:
    return (0 if entry.weight is None else id(entry.weight.leaf), entry.backward)


def _gradient(entry: _Entry) -> Tensor | None:
    if entry.weight is None:
        entry.work(*entry.held)
        return None
    if not entry.weight.leaf.requires_grad:  # frozen since
        return None
    if entry.can_add and _is_added(entry.weight, entry.work, entry.held):
        return None
    grad = entry.work(*entry.held)
    return grad.mT if entry.weight.is_transposed and grad is not None else grad


def _is_added(
    weight: "DeferredWeightGrad", work: Callable[..., object], held: tuple[Tensor, ...]
) -> bool:
    """Whether work that can add could be added to the weight's `grad`, and was."""
    target = weight.target()
    if target is None or not target.accumulate or not fits(target.grad, *held):
        return False
    work(*held, to=target.grad)
    return True


def _told(entry: _Entry) -> str:
    name = name_of(entry.work) if entry.name is None else entry.name
    if entry.weight is None:
        return name
    leaf = entry.weight.leaf
    return f"{name}, gradient of a weight of shape {tuple(leaf.shape)} in {leaf.dtype}"


@final
class DeferredWeightGrad:
    """Whose gradient a function may defer, and where to. From `deferrable`.

    Attributes:
        leaf: the weight.
        is_transposed: whether the function works with `leaf.mT`.
        accumulation: of the weight's gradient; None: autograd's, as somebody observes it.
        work_list: of the store; None: nothing is deferred.
    """

    # No dataclass: one is made for every use.
    __slots__ = ("accumulation", "is_transposed", "leaf", "node", "work_list")

    def __init__(
        self,
        leaf: Tensor,
        is_transposed: bool,
        accumulation: InPlaceAccumulation | None,
        work_list: WorkList | None,
        node: Node,
    ) -> None:
        self.leaf = leaf
        self.node = node  # of the alias, held so that it stays the same
        self.is_transposed = is_transposed
        self.accumulation = accumulation
        self.work_list = work_list

    @property
    def weight(self) -> Tensor:
        """The leaf, or its transpose, as the function works with it."""
        return self.leaf.detach().mT if self.is_transposed else self.leaf.detach()

    def target(self) -> GradTarget | None:
        """Where products may be put in place, in the layout of `weight`; None: nowhere.

        Nor where a backward asks for the gradients of other tensors alone (`torch.autograd.grad`).
        """
        if self.accumulation is None or not is_asked_for(self.node):
            return None
        target = self.accumulation.target(self.leaf)
        return target.mT if self.is_transposed and target is not None else target

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs now leaves weight gradients for later."""
        return self.work_list is not None and self.work_list.deferring


@final
@dataclass(frozen=True, slots=True, eq=False)
class Splitting:
    """A `split_backward` in force: where work goes."""

    work_list: WorkList

    def of(
        self, weight: Tensor, accumulation: InPlaceAccumulation | None = None
    ) -> tuple[Tensor, DeferredWeightGrad | None]:
        """See `deferrable`."""
        work_list = self.work_list
        is_grad_enabled = torch.is_grad_enabled() and maybe_current_level() is None
        if not is_grad_enabled or saved_tensors_hooks_in_force() is not None:
            work_list.may_repeat = True
        leaf = _leaf_of(weight) if is_grad_enabled else None
        if leaf is None:
            return weight, None
        known = self._known(leaf)
        accumulation = None if known.is_observed else accumulation or work_list.accumulation
        is_transposed = leaf is not weight
        deferred = DeferredWeightGrad(leaf, is_transposed, accumulation, work_list, known.node)
        return known.alias.mT if is_transposed else known.alias, deferred

    def _known(self, leaf: Tensor) -> _Known:
        """One alias for each weight: autograd then sums over its uses before delivering."""
        known = self.work_list.aliases.get(id(leaf))
        if known is not None and address(known.alias) == address(leaf):
            return known
        # With the leaf, so that its id stays its own.
        alias = _alias_of(leaf)
        known = _Known(leaf, alias, node_of_leaf(alias), is_observed(leaf))
        self.work_list.aliases[id(leaf)] = known
        return known


def current_splitting() -> Splitting | None:
    """The innermost `split_backward` in force, also in a thread of autograd; None outside."""
    # A torch function mode is asked, as autograd hands those on to its threads.
    if has_torch_function((None,)):  # of nothing it would not look for modes
        return handle_torch_function(current_splitting, ())
    return None


def deferrable(
    weight: Tensor, accumulation: InPlaceAccumulation | None = None
) -> tuple[Tensor, DeferredWeightGrad | None]:
    """What to give an autograd function whose backward calls `defer`.

    Without grad mode and for what is neither a trained leaf nor its transpose, that is the weight
    itself and None: its gradient is then computed at once. So also outside of `split_backward`, but
    see `accumulated`.

    Args:
        weight: any shape and float dtype.
        accumulation: of this weight's gradient; None: that of the store.

    Returns:
        An alias of the weight, which requires grad, and whose gradient goes to the weight; and what
        to give to `defer`.
    """
    splitting = current_splitting()
    if splitting is None:
        return accumulated(weight, accumulation)
    return splitting.of(weight, accumulation)


def accumulated(
    weight: Tensor, accumulation: InPlaceAccumulation | None
) -> tuple[Tensor, DeferredWeightGrad | None]:
    """As `deferrable`, for a gradient that is never deferred; (weight, None) without accumulation.

    An observed weight stays in the graph, as does a transpose, whose own graph observes the weight.
    """
    if accumulation is None or not torch.is_grad_enabled():
        return weight, None
    leaf = _leaf_of(weight)
    if leaf is None or leaf is not weight or is_observed(leaf):
        return weight, None
    alias = _alias_of(leaf)
    return alias, DeferredWeightGrad(leaf, False, accumulation, None, node_of_leaf(alias))


def defer(
    deferred: DeferredWeightGrad | None,
    work: Callable[..., Tensor | None],
    *held: Tensor,
    can_add: bool = False,
) -> Tensor | None:
    """Return the weight's gradient `work(*held)`, or None where it is deferred until W.

    To be called from a backward whose function got `deferred` from `deferrable`.

    Args:
        deferred: None: compute at once.
        work: returns the gradient, in the shape of the weight that the function was given.
            Runs without grad mode, once.
        held: the tensors that it needs; they stay alive until W, so hold no others in `work`.
        can_add: whether `work(*held, to=grad)` adds the gradient to a tensor of the weight's shape
            and of the dtype of all that is held, for `InPlaceAccumulation`.
    """
    if deferred is None:
        return work(*held)
    if deferred.work_list is not None and deferred.work_list.deferring:
        deferred.work_list.add(work, held, weight=deferred, can_add=can_add)
        return None
    return None if can_add and _is_added(deferred, work, held) else work(*held)


def _leaf_of(weight: Tensor) -> Tensor | None:
    """The trained leaf that a weight is, or is the transpose of; None for all else."""
    if not weight.requires_grad or type(weight) not in PLAIN_TYPES:
        return None
    if weight.is_leaf:
        return weight
    before = [node for node, _ in weight.grad_fn.next_functions] if weight.grad_fn else []
    leaf = getattr(before[0], "variable", None) if len(before) == 1 else None
    if leaf is None or type(leaf) not in PLAIN_TYPES:
        return None
    if leaf.dim() < 2 or leaf.dtype != weight.dtype or weight.retains_grad or has_hooks(weight):
        return None
    if address(weight) != address(leaf) or weight.shape != leaf.mT.shape:
        return None
    return leaf if weight.stride() == leaf.mT.stride() else None


def _alias_of(leaf: Tensor) -> Tensor:
    """A weight's values in a graph that does not lead to the weight.

    A leaf of its own, as autograd hands a leaf its gradient at once, while that is in the cache and
    before the next one is made.
    """
    alias = leaf.detach().requires_grad_()

    def hand_on(alias: Tensor) -> None:
        grad, alias.grad = alias.grad, None
        if grad is not None:
            gradients = [grad]
            del grad
            deliver([leaf], gradients)

    alias.register_post_accumulate_grad_hook(hand_on)
    return alias
