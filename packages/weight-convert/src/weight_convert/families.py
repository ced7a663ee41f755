"""What a model family calls its tensors, as data that is read in both directions.

Training wants the experts of a layer in one fused tensor; checkpoints that `transformers` writes
hold one tensor per expert. A `FamilySpec` states that relation once. Fusing, splitting, comparing
and the checkpoint keys of a trainer are all derived from it, so that no two procedures can drift
apart.

Invariant: the `stored_views` of a fused tensor tile it exactly, each view is contiguous in the
fused tensor's row-major memory, and `locate` names for each stored key the place that
`stored_views` gives it.

    spec = get_spec("qwen3_moe")
    views = spec.stored_views("model.layers.0.mlp.experts.down_proj", (128, 2048, 768))
    views[3].key      # "model.layers.0.mlp.experts.3.down_proj.weight"
    views[3].offset   # (3, 0, 0)

The families follow `transformers.conversion_mapping` (read at version 5.23; nothing is imported).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from weight_convert._checks import Record, check_kind
from weight_convert.errors import UnknownFamilyError, WeightConvertError

# E experts, P parts of a fused tensor, h rows of one part, d columns.
_LAYER = r"(?P<layer>(?:.+\.)?layers\.\d+)"
_EXPERT = r"(?P<expert>0|[1-9]\d{0,17})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView(Record):
    """One stored tensor as a box of one tensor in memory.

    Attributes:
        key: name of the tensor on disk.
        offset: where the box starts in the tensor in memory, one number per dim of it.
        shape: the box's shape in the tensor in memory (as many dims as `offset`).
        stored_shape: the shape written to disk; as many elements as `shape`, in the same order.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts(Record):
    """One fused tensor `[E, P*h, d]` and the stored tensors `[h, d]` that it is made of.

    Attributes:
        fused: name in memory; `{layer}` stands for a path that ends in `layers.<number>`.
        parts: names on disk, in the order of their rows in the fused tensor; `{expert}` stands for
            the expert's number. Part `p` of expert `e` is `fused[e, p*h:(p+1)*h, :]`.
    """

    fused: str
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse templates that could not be read in both directions."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        if not self.parts:
            raise WeightConvertError(f"{self.fused} needs at least one part")
        for name in (self.fused, *self.parts):
            if name.count("{layer}") != 1:
                raise WeightConvertError(f"template {name!r} must hold {{layer}} exactly once")
        for name in self.parts:
            if name.count("{expert}") != 1:
                raise WeightConvertError(f"template {name!r} must hold {{expert}} exactly once")
        if "{expert}" in self.fused or len(set(self.parts)) != len(self.parts):
            raise WeightConvertError(f"{self.fused!r} must not hold {{expert}}, nor a part twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    """Where a stored per-expert tensor sits in its fused tensor."""

    layer: str
    group: FusedExperts
    expert: int
    part: int

    @property
    def fused_key(self) -> str:
        """Name of the fused tensor that holds this one."""
        return self.group.fused.format(layer=self.layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(Record):
    """How one family of models names its expert tensors; every other tensor maps to itself.

    Attributes:
        model_type: the `model_type` of `config.json`.
        experts: the fused tensors of an MoE layer.
        router: name of the router's weight `[E, d]`; a layer that has it must have its experts too.
        num_experts_keys: names under which `config.json` may state the number of experts.
    """

    model_type: str
    experts: tuple[FusedExperts, ...]
    router: str
    num_experts_keys: tuple[str, ...]

    def stored_views(self, name: str, shape: tuple[int, ...]) -> tuple[StoredView, ...]:
        """Return how the tensor `name` of `shape` in memory appears on disk, in memory order.

        Args:
            name: name of a parameter or buffer in memory.
            shape: its full shape; `[E, P*h, d]` for a fused expert tensor.

        Returns:
            `E*P` views for a fused expert tensor (expert-major), else the one view that is the
            tensor itself.

        Raises:
            WeightConvertError: a fused name whose shape is not `[E, P*h, d]` with E at least 1.
        """
        check_kind(shape, tuple, f"the shape of {name} must be a tuple")
        found = self.fused_group(name)
        if found is None:
            return (
                StoredView(key=name, offset=(0,) * len(shape), shape=shape, stored_shape=shape),
            )
        layer, group = found
        num_parts = len(group.parts)
        if len(shape) != 3 or shape[0] < 1 or shape[1] % num_parts:
            raise WeightConvertError(
                f"{name} has shape {list(shape)}; expected [experts, {num_parts} * rows, columns] "
                f"with at least one expert"
            )
        num_experts, h, d = shape[0], shape[1] // num_parts, shape[2]
        return tuple(
            StoredView(
                key=template.format(layer=layer, expert=expert),
                offset=(expert, part * h, 0),
                shape=(1, h, d),
                stored_shape=(h, d),
            )
            for expert in range(num_experts)
            for part, template in enumerate(group.parts)
        )

    def fused_group(self, name: str) -> tuple[str, FusedExperts] | None:
        """Return (layer path, group) when `name` is a fused expert tensor, else None."""
        check_kind(name, str, "a tensor's name must be a string")
        for group in self.experts:
            match = _pattern(group.fused).fullmatch(name)
            if match is not None:
                return match["layer"], group
        return None

    def locate(self, key: str) -> ExpertPlace | None:
        """Return the place of the stored tensor `key` in its fused tensor; None if it has none."""
        check_kind(key, str, "a tensor's name must be a string")
        for group in self.experts:
            for part, template in enumerate(group.parts):
                match = _pattern(template).fullmatch(key)
                if match is not None:
                    expert = int(match["expert"])
                    return ExpertPlace(layer=match["layer"], group=group, expert=expert, part=part)
        return None

    def is_unmapped_expert(self, key: str) -> bool:
        """Return whether `key` belongs to one expert but is none of the parts, such as a scale."""
        stems = {
            part.partition("{expert}")[0] + "{expert}."
            for group in self.experts
            for part in group.parts
        }
        return self.locate(key) is None and any(_pattern(stem).match(key) for stem in stems)

    def router_layer(self, key: str) -> str | None:
        """Return the layer path when `key` is the router's weight of an MoE layer, else None."""
        match = _pattern(self.router).fullmatch(key)
        return None if match is None else match["layer"]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """Compile a template into the expression that matches a whole tensor name."""
    text = re.escape(template).replace(re.escape("{layer}"), _LAYER)
    return re.compile(text.replace(re.escape("{expert}"), _EXPERT))


_QWEN3_MOE = FamilySpec(
    model_type="qwen3_moe",
    experts=(
        FusedExperts(
            fused="{layer}.mlp.experts.gate_up_proj",
            parts=(
                "{layer}.mlp.experts.{expert}.gate_proj.weight",
                "{layer}.mlp.experts.{expert}.up_proj.weight",
            ),
        ),
        FusedExperts(
            fused="{layer}.mlp.experts.down_proj",
            parts=("{layer}.mlp.experts.{expert}.down_proj.weight",),
        ),
    ),
    router="{layer}.mlp.gate.weight",
    num_experts_keys=("num_experts", "num_local_experts"),
)

FAMILIES: Mapping[str, FamilySpec] = {spec.model_type: spec for spec in (_QWEN3_MOE,)}


def get_spec(model_type: str) -> FamilySpec:
    """Return the spec of a family by the `model_type` of its `config.json`.

    Raises:
        UnknownFamilyError: no such family; the message names the nearest one and lists all.
    """
    check_kind(model_type, str, "model_type must be a string")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    near = get_close_matches(model_type, FAMILIES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownFamilyError(
        f"no family spec for model_type {model_type!r}{hint} (known: {', '.join(sorted(FAMILIES))})"
    )
