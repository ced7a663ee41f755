"""All tensors of a model cut for a layout, and the stage that has each.

model = ModelCuts.of({"model.norm.weight": (64,)}, spec, config, SplitLayout(pp=2))
model.is_on(1, "model.norm.weight")      # True: behind the layers
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weight_convert._checks import is_block
from weight_convert.cutting.cuts import Cutter, DimCut
from weight_convert.cutting.layout import SplitLayout, shares
from weight_convert.specs import FamilySpec

_Place = tuple[int, int]  # (before, in or behind the layers; number of the layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCuts:
    """The cuts of every tensor in memory.

    Attributes:
        layout: the degrees.
        model_type: the family.
        cuts: by name in memory.
        unknown_keys: tensors that the spec does not name; each rank of their stage has them whole.
    """

    layout: SplitLayout
    model_type: str
    cuts: Mapping[str, tuple[DimCut, ...]]
    unknown_keys: tuple[str, ...]
    _places: Mapping[str, _Place]
    _stages: tuple[range, ...]
    _is_tied: bool

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        spec: FamilySpec,
        config: Mapping[str, Any],
        layout: SplitLayout,
    ) -> "ModelCuts":
        """Cut the tensors of these shapes.

        Layers are dealt to stages in order, the first ones get one more; what is before them is on
        the first stage, all else on the last, layers of multi-token prediction too.

        Raises:
            WeightConvertError: see `Cutter.cuts`.
        """
        config = spec.config_of(config)
        cutter = Cutter(spec, config, layout)
        places = {key: cutter.place_of(key) for key in shapes}
        counted = config.get("num_hidden_layers")
        if type(counted) is not int:
            counted = 1 + max((n for part, n in places.values() if part == 1), default=-1)
        return cls(
            layout=layout,
            model_type=spec.model_type,
            cuts={
                key: cutter.cuts(key, *_shape_and_block(key, shapes, spec, config))
                for key in shapes
            },
            unknown_keys=tuple(key for key in shapes if not cutter.is_known(key)),
            _places=places,
            _stages=tuple(range(begin, begin + n) for begin, n in shares(counted, layout.pp)),
            _is_tied="lm_head.weight" not in shapes,
        )

    def shape_on(self, rank: int, key: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of what a rank holds of a tensor; None if its stage has it not."""
        places = self.layout.places(rank)
        if not self.is_on(places["pp"], key):
            return None
        local = list(shape)
        for cut in self.cuts[key]:
            local[cut.dim] = cut.length(places[cut.axis])
        return tuple(local)

    def is_on(self, stage: int, key: str) -> bool:
        """Whether a stage has a tensor; tied embeddings are on the first and the last one."""
        part, layer = self._places[key]
        last = len(self._stages) - 1
        if part == 0:
            is_head = self._is_tied and "embed_tokens" in key
            return stage == 0 or (stage == last and is_head)
        if part == 2 or layer >= self._stages[last].stop:
            return stage == last
        return layer in self._stages[stage]


def _shape_and_block(
    key: str,
    shapes: Mapping[str, tuple[int, ...]],
    spec: FamilySpec,
    config: Mapping[str, Any],
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape that decides how a tensor is cut, and the block of it that has one scale."""
    suffix = next((end for end in spec.companions if key.endswith(end)), "")
    owner = key.removesuffix(suffix) if suffix else key
    shape = shapes.get(owner, shapes[key])
    quantisation = config.get("quantization_config")
    size = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    scaled = bool(suffix) or any(key + end in shapes for end in spec.companions)
    if not scaled or not is_block(size) or len(size) > len(shape):
        return shape, None
    return shape, (1,) * (len(shape) - len(size)) + tuple(size)
