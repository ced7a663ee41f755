import pytest

from weight_convert.errors import WeightConvertError
from weight_convert.merging import Slice
from weight_convert.merging.stacking import stacked
from weight_convert.outputs import PlannedTensor

VISION = "model.vision_tower.encoder.layers"


def model(*keys: str) -> dict[str, PlannedTensor]:
    return {
        key: PlannedTensor(key=key, dtype="U8", shape=(), pieces=(), order=((), 0, 0))
        for key in keys
    }


def names(*keys: str) -> list[str]:
    """Of the output of layers 1 and 2, and then layer 1 again."""
    slices = (Slice(path="a", begin=1, end=3), Slice(path="a", begin=1, end=2))
    return sorted(tensor.key for tensor in stacked(slices, [model(*keys)] * 2, [None] * 2))


@pytest.mark.parametrize("decoder", ["model.language_model", "language_model.model", "decoder"])
@pytest.mark.parametrize("other", [VISION, "mtp.layers", "model.audio_tower.layers"])
def test_layers_of_other_parts_stay_as_the_first_model_has_them(decoder: str, other: str) -> None:
    outside = [f"{other}.{n}.weight" for n in range(2)]
    layers = [f"{decoder}.layers.{n}.weight" for n in range(3)]
    assert names(*outside, *layers) == sorted(outside + layers)


def test_the_only_layers_are_the_decoder_s_whatever_stands_before_and_inside_of_them() -> None:
    for stem in ("layers", "gpt.blocks.layers", "model.encoder.layers"):
        keys = [f"{stem}.{n}.mlp.layers.{m}.weight" for n in range(3) for m in range(2)]
        assert names(*keys) == keys


@pytest.mark.parametrize(
    "stems",
    [
        ("model.encoder.layers", "model.decoder.layers"),
        ("thinker.model.layers", "talker.model.layers"),
        ("model.layers", "decoder.layers"),
    ],
)
def test_names_that_do_not_say_which_layers_are_the_decoder_s_are_refused(
    stems: tuple[str, str],
) -> None:
    keys = [f"{stem}.{n}.weight" for stem in stems for n in range(3)]
    listed = r"\., ".join(sorted(stems))
    with pytest.raises(WeightConvertError, match=f"a has layers under {listed}"):
        names(*keys)


def test_layers_behind_those_of_the_config_stay_behind_the_stacked_ones() -> None:
    keys = [f"model.layers.{n}.norm.weight" for n in range(12)]
    behind = [f"model.layers.{n}.eh_proj.weight" for n in (10, 11)]
    slices = (Slice(path="a", begin=0, end=9), Slice(path="a", begin=2, end=10))
    found = stacked(slices, [model(*keys, *behind)] * 2, [10, 10])
    expected = {f"model.layers.{n}.norm.weight" for n in range(19)}
    expected |= {f"model.layers.{n}.eh_proj.weight" for n in (17, 18)}
    assert {tensor.key for tensor in found} == expected and len(found) == 21
    with pytest.raises(WeightConvertError, match=r"a has no layer 10 in its decoder, which has 10"):
        stacked((Slice(path="a", begin=9, end=11),), [model(*keys)], [10])
