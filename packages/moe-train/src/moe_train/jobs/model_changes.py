"""How one `config.json` differs from another, and which of the differences touch the weights.

Invariant: a new key of a family needs no entry here. Each changed key is tried alone: if the
decoder then has other tensors, no weights fit it; if it is read as another one, it computes
otherwise.

    for change in model_changes(read_decoder(checkpoint), read_model_config(config)):
        print(change, change.on_resume)     # model.num_experts_per_tok: 2 -> 4 asked
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_train.config import KeyChange
from moe_train.errors import MoeTrainError
from moe_train.layout import ParameterLayout, single_rank_layouts
from moe_train.model import DecoderConfig, DecoderStage

_WRITTEN_BY_SAVES = {"architectures", "dtype", "torch_dtype", "transformers_version"}
_OF_RANDOM_WEIGHTS = {"initializer_range"}  # which a resumed run has not

Shapes = Mapping[str, tuple[int, ...]]


def model_changes(old: DecoderConfig, new: DecoderConfig) -> list[KeyChange]:
    """Every key of `config.json` with another value; its `on_resume` is free, asked or never."""
    names = sorted((old.extra.keys() | new.extra.keys()) - _WRITTEN_BY_SAVES)
    changed = [name for name in names if old.extra.get(name) != new.extra.get(name)]
    if not changed:
        return []
    shapes = _stored_shapes(old)
    fits = shapes == _stored_shapes(new)
    return [
        KeyChange(
            name=f"model.{name}",
            old=old.extra.get(name),
            new=new.extra.get(name),
            on_resume=_effect(old, new, name, None if fits else shapes),
        )
        for name in changed
    ]


def whole_layouts(model: DecoderConfig) -> dict[str, ParameterLayout]:
    """The layout of every tensor of the decoder on one rank, made without memory."""
    return single_rank_layouts(DecoderStage.without_memory(model), model)


def _stored_shapes(model: DecoderConfig) -> Shapes:
    views = (view for layout in whole_layouts(model).values() for view in layout.form.views)
    return {view.key: tuple(view.stored_shape) for view in views}


def _effect(old: DecoderConfig, new: DecoderConfig, name: str, shapes: Shapes | None) -> Any:
    """What the change of one key does; `shapes` are the old ones where the new ones differ."""
    values = {key: value for key, value in old.extra.items() if key != name}
    if name in new.extra:
        values[name] = new.extra[name]
    try:
        tried = DecoderConfig.from_dict(values)
        if shapes is not None and _stored_shapes(tried) != shapes:
            return "never"
    except MoeTrainError:  # it makes no decoder without the other changes
        return "asked" if shapes is None else "never"
    same = replace(tried, extra={}) == replace(DecoderConfig.from_dict(old.extra), extra={})
    return "free" if same or name in _OF_RANDOM_WEIGHTS else "asked"
