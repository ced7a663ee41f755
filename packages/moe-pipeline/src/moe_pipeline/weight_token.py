"""Weight gradients that are put off: which weight, what to compute, and how it gets its gradient.

A backward that is split computes the gradients of inputs now (I) and those of weights later (W).
Autograd has no such thing: a function that returns None for a weight has that weight's hooks called
without a gradient. So inside `moe_pipeline.weight_queue.split_backward` a function is given an
*alias* of a weight, which is no part of the weight's graph, and a token that says whose alias it
is. A gradient of the alias is delivered to the weight; without one nothing happens to it.

How an autograd function of your own takes part:

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, token):
            ctx.save_for_backward(x, weight)
            ctx.token = token
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_weight = None
            if ctx.needs_input_grad[1]:
                grad_weight = put_off(ctx.token, lambda x, grad: x.t() @ grad, x, grad)
            return grad @ weight.t(), grad_weight, None

    y = Scaled.apply(x, *splittable(weight))

Invariant: what is put off runs once, in order, and its gradient reaches the weight as autograd
delivers one: added to `grad`, once for all uses of a weight in one backward, hooks and
post-accumulate hooks called. Only `torch.autograd.grad` with respect to the weight is left out: the
graph does not lead there.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from moe_pipeline._torch_private import run_backward

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _Entry(NamedTuple):
    """One piece of work, with the tensors that it keeps alive."""

    work: Callable[..., Tensor | None]
    held: tuple[Tensor, ...]
    token: "WeightToken | None"  # whose gradient it returns; None: it returns nothing
    backward: int  # of which backward: uses of a weight in one are summed first
    name: str


@final
class WorkList:
    """What was put off, in order. `WeightQueue` is the part that users see.

    Attributes:
        deferring: whether a backward that runs now puts its weight gradients here.
        num_backwards: how many such backwards there were.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.num_backwards = 0
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        work: Callable[..., Tensor | None],
        held: tuple[Tensor, ...],
        *,
        token: "WeightToken | None" = None,
        name: str | None = None,
    ) -> None:
        """Put off `work(*held)`; its result goes to the token's weight."""
        # Detached: a saved tensor comes with its graph, which would stay alive.
        kept = tuple(tensor.detach() for tensor in held)
        named = name_of(work) if name is None else name
        self._entries.append(_Entry(work, kept, token, self.num_backwards, named))

    @property
    def held_bytes(self) -> int:
        """Bytes of the distinct storages that the entries keep alive."""
        storages = [t.untyped_storage() for entry in self._entries for t in entry.held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @torch.no_grad()
    def run(self) -> None:
        """Run and forget everything that is here now; after an error nothing is left either."""
        entries, self._entries = self._entries, deque()
        left = Counter(_sum_key(entry) for entry in entries)
        sums: dict[tuple[int, int], Tensor] = {}
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
                if entry.token is not None and left[key] == 0 and key in sums:
                    deliver(entry.token.leaf, [sums.pop(key)])
            except Exception as error:
                error.add_note(f"in work {position} of {total} of a weight queue: {_told(entry)}")
                raise


def name_of(work: Callable[..., object]) -> str:
    """Of a function, or of the one inside a partial, whose repr would print tensors."""
    inner = getattr(work, "func", work)
    return str(getattr(inner, "__qualname__", type(work).__name__))


def _sum_key(entry: _Entry) -> tuple[int, int]:
    return (0 if entry.token is None else id(entry.token.leaf), entry.backward)


def _gradient(entry: _Entry) -> Tensor | None:
    if entry.token is None:
        entry.work(*entry.held)
        return None
    if not entry.token.leaf.requires_grad:  # frozen since
        return None
    grad = entry.work(*entry.held)
    return grad.mT if entry.token.is_transposed and grad is not None else grad


def _told(entry: _Entry) -> str:
    if entry.token is None:
        return entry.name
    leaf = entry.token.leaf
    return f"{entry.name}, gradient of a weight of shape {tuple(leaf.shape)} in {leaf.dtype}"


@final
@dataclass(frozen=True, slots=True, eq=False)
class WeightToken:
    """Whose gradient a function may put off, and where to. From `splittable`.

    Attributes:
        work_list: of the queue.
        leaf: the weight.
        is_transposed: whether the function works with `leaf.mT`.
    """

    work_list: WorkList
    leaf: Tensor
    is_transposed: bool = False

    @property
    def weight(self) -> Tensor:
        """The leaf, or its transpose, as the function works with it."""
        return self.leaf.detach().mT if self.is_transposed else self.leaf.detach()

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs now leaves weight gradients for later."""
        return self.work_list.deferring


@final
@dataclass(slots=True, eq=False)
class Splitting:
    """A `split_backward` in force: where work goes, and the aliases that exist already."""

    work_list: WorkList
    aliases: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, weight: Tensor) -> tuple[Tensor, WeightToken | None]:
        """See `splittable`."""
        if type(weight) not in _PLAIN_TYPES or not weight.requires_grad:
            return weight, None
        if not torch.is_grad_enabled():
            return weight, None
        leaf = _leaf_of(weight)
        if leaf is None:
            return weight, None
        # One alias of each weight: autograd then sums over its uses before delivering.
        if id(leaf) not in self.aliases:
            anchor = torch.empty((), requires_grad=True)
            self.aliases[id(leaf)] = leaf, _Alias.apply(anchor, (leaf,))
        alias = self.aliases[id(leaf)][1]
        token = WeightToken(self.work_list, leaf, leaf is not weight)
        return (alias if leaf is weight else alias.mT), token


def current_splitting() -> Splitting | None:
    """The innermost `split_backward` in force, also in a thread of autograd; None outside."""
    # A torch function mode is asked, as autograd hands those on to its threads.
    if has_torch_function((None,)):  # of nothing it would not look for modes
        return handle_torch_function(current_splitting, ())
    return None


def splittable(weight: Tensor) -> tuple[Tensor, WeightToken | None]:
    """What to give an autograd function whose backward calls `put_off`: a weight and its token.

    Outside of `split_backward`, without grad mode, and for what is neither a trained leaf nor its
    transpose, that is the weight itself and None: its gradient is then computed at once.

    Args:
        weight: any shape and float dtype.

    Returns:
        An alias of the weight, which requires grad, and whose gradient goes to the weight; and the
        token for `put_off`.
    """
    splitting = current_splitting()
    return (weight, None) if splitting is None else splitting.of(weight)


def put_off(
    token: WeightToken | None, work: Callable[..., Tensor | None], *held: Tensor
) -> Tensor | None:
    """Return the weight's gradient `work(*held)`, or None where it is put off until W.

    To be called from a backward whose function got `token` from `splittable`.

    Args:
        token: None: compute at once.
        work: returns the gradient, in the shape of the weight that the function was given.
            Runs without grad mode, once.
        held: the tensors that it needs; they stay alive until W, so hold no others in `work`.
    """
    if token is None or not token.is_deferring:
        return work(*held)
    token.work_list.add(work, held, token=token)
    return None


def deliver(leaf: Tensor, box: list[Tensor]) -> None:
    """Give a leaf the gradient in `box` as autograd does, hooks included; empties the box.

    In a box, as a gradient that nobody else holds becomes `leaf.grad` without a copy. A leaf that
    was frozen since its forward gets none.
    """
    if not leaf.requires_grad:
        box.clear()
        return
    with torch.enable_grad():
        root = _Delivery.apply(box, leaf)
    # Not torch's own function, which compares shapes first: this runs for every weight in every W.
    ones = torch.ones_like(root)
    run_backward((root,), (ones,), retain_graph=False, create_graph=False, inputs=())


def _leaf_of(weight: Tensor) -> Tensor | None:
    """The leaf that a weight is, or is the transpose of; None for all else."""
    if weight.is_leaf:
        return weight
    before = [node for node, _ in weight.grad_fn.next_functions] if weight.grad_fn else []
    leaf = getattr(before[0], "variable", None) if len(before) == 1 else None
    if leaf is None or type(leaf) not in _PLAIN_TYPES:
        return None
    if leaf.dim() < 2 or leaf.dtype != weight.dtype:
        return None
    if weight.data_ptr() != leaf.data_ptr() or weight.shape != leaf.mT.shape:
        return None
    return leaf if weight.stride() == leaf.mT.stride() else None


@final
class _Alias(torch.autograd.Function):
    """A weight's values in a graph that does not lead to the weight."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, boxed: tuple[Tensor]) -> Tensor:
        # Boxed, so that autograd does not see the weight.
        ctx.set_materialize_grads(False)
        ctx.boxed = boxed
        return boxed[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None:
            deliver(ctx.boxed[0], [grad])
        return None, None


@final
class _Delivery(torch.autograd.Function):
    """Its backward makes the gradient in the box that of the leaf."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], leaf: Tensor) -> Tensor:
        ctx.box = box
        return leaf.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.box.pop()
