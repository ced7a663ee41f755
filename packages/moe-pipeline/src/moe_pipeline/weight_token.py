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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from moe_pipeline._torch_private import run_backward, saved_tensors_hooks_in_force

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Of small weights, whose gradients wait for each other until they are delivered.
_TOGETHER_BYTES = 8 << 20


class _Entry(NamedTuple):
    """One piece of work, with the tensors that it keeps alive."""

    work: Callable[..., Tensor | None]
    held: tuple[Tensor, ...]
    token: "WeightToken | None"  # whose gradient it returns; None: it returns nothing
    backward: int  # of which backward: uses of a weight in one are summed first
    name: str | None  # None: that of the function


@final
class WorkList:
    """What was put off, in order. `WeightQueue` is the part that users see.

    Attributes:
        deferring: whether a backward that runs now puts its weight gradients here.
        num_backwards: how many such backwards there were.
        may_repeat: whether the backward may run a part of the forward again, which is then to be
            split: something was saved by way of hooks, or computed without grad mode.
        aliases: by the weight's id itself and its alias.
    """

    def __init__(self, beside: "WorkList | None" = None) -> None:
        self.aliases: dict[int, tuple[Tensor, Tensor]] = {} if beside is None else beside.aliases
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
        token: "WeightToken | None" = None,
        name: str | None = None,
    ) -> None:
        """Put off `work(*held)`; its result goes to the token's weight."""
        # Detached: a saved tensor comes with its graph, which would stay alive.
        kept = tuple([tensor.detach() for tensor in held])
        self._entries.append(_Entry(work, kept, token, self.num_backwards, name))

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
        ready = _Ready()
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
                    ready.add(entry.token.leaf, sums.pop(key))
            except Exception as error:
                error.add_note(f"in work {position} of {total} of a weight queue: {_told(entry)}")
                raise
        ready.deliver()


@final
class _Ready:
    """Gradients that are to be delivered together: each run of the engine costs some Python."""

    def __init__(self) -> None:
        self._leaves: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._num_bytes = 0

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Deliver soon; what is large, at once."""
        if any(leaf is other for other in self._leaves):  # its hooks are called for each gradient
            self.deliver()
        self._leaves.append(leaf)
        self._gradients.append(gradient)
        self._num_bytes += gradient.nbytes
        del gradient
        if self._num_bytes >= _TOGETHER_BYTES:
            self.deliver()

    def deliver(self) -> None:
        """Deliver what has been added."""
        leaves, self._leaves, self._num_bytes = self._leaves, [], 0
        try:
            deliver(leaves, self._gradients)
        except Exception as error:
            told = ", ".join(f"shape {tuple(leaf.shape)} in {leaf.dtype}" for leaf in leaves)
            error.add_note(f"in gradients of a weight queue, delivered to weights of {told}")
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
    name = name_of(entry.work) if entry.name is None else entry.name
    if entry.token is None:
        return name
    leaf = entry.token.leaf
    return f"{name}, gradient of a weight of shape {tuple(leaf.shape)} in {leaf.dtype}"


@final
class WeightToken:
    """Whose gradient a function may put off, and where to. From `splittable`.

    Attributes:
        work_list: of the queue.
        leaf: the weight.
        is_transposed: whether the function works with `leaf.mT`.
    """

    __slots__ = ("is_transposed", "leaf", "work_list")  # no dataclass: one is made for every use

    def __init__(self, work_list: WorkList, leaf: Tensor, *, is_transposed: bool) -> None:
        self.work_list = work_list
        self.leaf = leaf
        self.is_transposed = is_transposed

    @property
    def weight(self) -> Tensor:
        """The leaf, or its transpose, as the function works with it."""
        return self.leaf.detach().mT if self.is_transposed else self.leaf.detach()

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs now leaves weight gradients for later."""
        return self.work_list.deferring


@final
@dataclass(frozen=True, slots=True, eq=False)
class Splitting:
    """A `split_backward` in force: where work goes."""

    work_list: WorkList

    def of(self, weight: Tensor) -> tuple[Tensor, WeightToken | None]:
        """See `splittable`."""
        is_grad_enabled = torch.is_grad_enabled()
        if not is_grad_enabled or saved_tensors_hooks_in_force() is not None:
            self.work_list.may_repeat = True
        if not is_grad_enabled or not weight.requires_grad or type(weight) not in _PLAIN_TYPES:
            return weight, None
        leaf = _leaf_of(weight)
        if leaf is None:
            return weight, None
        alias = self._alias(leaf)
        if leaf is weight:
            return alias, WeightToken(self.work_list, leaf, is_transposed=False)
        return alias.mT, WeightToken(self.work_list, leaf, is_transposed=True)

    def _alias(self, leaf: Tensor) -> Tensor:
        """One for each weight: autograd then sums over its uses before delivering."""
        found = self.work_list.aliases.get(id(leaf))
        if found is not None and found[1].data_ptr() == leaf.data_ptr():
            return found[1]
        anchor = torch.empty((), requires_grad=True)
        alias: Tensor = _Alias.apply(anchor, (leaf,))
        self.work_list.aliases[id(leaf)] = leaf, alias  # alive, so that its id stays its own
        return alias


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


def deliver(leaves: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Give leaves their gradients as autograd does, hooks included; empties the list.

    A gradient that nobody else holds becomes `leaf.grad` without a copy. A leaf that was frozen
    since its forward gets none.
    """
    boxes = [[gradient] for gradient in gradients]
    gradients.clear()
    given = [pair for pair in zip(leaves, boxes, strict=True) if pair[0].requires_grad]
    del boxes
    if not given:
        return
    with torch.enable_grad():
        root = _Delivery.apply([box for _, box in given], *(leaf for leaf, _ in given))
    # Not torch's own function, which compares shapes first: this runs in every W.
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
            deliver(ctx.boxed, [grad])
        return None, None


@final
class _Delivery(torch.autograd.Function):
    """Its backward makes the gradients in the boxes those of the leaves."""

    @staticmethod
    def forward(ctx: Any, boxes: list[list[Tensor]], *leaves: Tensor) -> Tensor:
        ctx.boxes = boxes
        return leaves[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[box.pop() for box in ctx.boxes]
