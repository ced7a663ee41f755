"""How much of a layer is kept for its backward: all, or less in one of three forms.

    run = LayerRecompute(form="selective", keep=kept_operations(("matrix_products",)))
    x_BSd, routed = run(layer, x_BSd, context, None)       # instead of layer(x_BSd, context, None)

- "layers": its inputs; the backward computes the layer again.
- "selective": also what some operations returned; the backward computes the rest again.
- "outputs": all but what is cheap and large: the outputs of its norms and of a dense MLP's
  activation, which the backward computes again one by one (`discarded` in the layers).

Invariant: losses, gradients, routing and random numbers are those without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from moe_pipeline.recomputation import (
    MATRIX_PRODUCTS,
    discard_outputs,
    recompute,
    selective_recompute,
)
from moe_train.errors import TrainValueError

Form = Literal["layers", "selective", "outputs"]
_Value = TypeVar("_Value")

_ATEN = torch.ops.aten
OPERATION_GROUPS: dict[str, frozenset[Any]] = {
    "matrix_products": MATRIX_PRODUCTS,
    "attention": frozenset(
        {
            _ATEN._scaled_dot_product_flash_attention.default,
            _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
            _ATEN._scaled_dot_product_efficient_attention.default,
            _ATEN._scaled_dot_product_cudnn_attention.default,
        }
    ),
}
"""Operations by the names that jobs give them; others by torch's, as in "aten.mm.default"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecompute:
    """Calls layers so that their backward has what it needs.

    Args:
        form: None: everything is kept.
        keep: of form "selective": the operations whose results are kept.
    """

    form: Form | None = None
    keep: frozenset[Any] = frozenset()

    def __call__(self, layer: Callable[..., _Value], *args: Any) -> _Value:
        """What the layer returns; collective where the layer is, in its backward too."""
        if self.form == "layers":
            return recompute(layer, *args)
        if self.form == "selective":
            return selective_recompute(layer, *args, keep=self.keep)
        if self.form == "outputs":
            with discard_outputs():
                return layer(*args)
        return layer(*args)


KEEP_ALL = LayerRecompute()
"""The backward finds all that it needs."""


def kept_operations(names: Sequence[str]) -> frozenset[Any]:
    """The operations of these names: of `OPERATION_GROUPS`, or torch's own ("aten.mm.default").

    Raises:
        ValueError: a name of no operation.
    """
    found: set[Any] = set()
    for name in names:
        found |= OPERATION_GROUPS.get(name) or {_operation(name)}
    return frozenset(found)


def _operation(name: str) -> Any:
    """Torch's operation `namespace.name.overload`."""
    parts = name.split(".")
    found: Any = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if len(parts) != 3 or found is None:
        raise TrainValueError(
            f"train.recompute_keep names {name!r}, which is no operation of torch; give "
            f"{', '.join(OPERATION_GROUPS)}, or a name such as aten.mm.default"
        )
    return found
