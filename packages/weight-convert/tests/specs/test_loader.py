from pathlib import Path

import pytest

from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.specs import Matcher, Side, family_names, get_spec, read_spec, spec_text

_DIMS = 'dims = "row column -> expert row column"'


def test_every_family_names_each_tensor_of_its_rules() -> None:
    for name in family_names():
        spec = get_spec(name)
        assert spec.model_type == name
        assert spec.formats["fused"].rules == ()
        sides = [Side(names=(key,), groups=()) for key in spec.tensors]
        known = Matcher(sides, spec.companions)
        targets = {key for f in spec.formats.values() for r in f.rules for key in r.target.names}
        for key in {*targets, *spec.experts, spec.router}:
            assert (
                known.find(key.replace("{layer}", "model.layers.0").replace("{n}", "0")) is not None
            ), (name, key)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(UnknownFamilyError, match=r"'qwen3moe'; did you mean 'qwen3_moe'\?"):
        get_spec("qwen3moe")
    with pytest.raises(WeightConvertError, match=r"known: .*qwen3_moe"):
        get_spec("gpt2")


def test_the_printed_file_of_a_family_reads_as_the_family(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(spec_text("mixtral"))
    assert read_spec(path) == get_spec("mixtral")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('model_type = "mixtral"', "", "the file lacks model_type"),
        ('model_type = "mixtral"', "model_type = 3", "model_type is 3; expected a string"),
        ('router = "', 'rooter = "', "lacks router and has the unknown rooter"),
        ("vocab: vocab", "vocabs: vocab", "tensors.*expected 'role: dims'"),
        ("row column -> expert row column", "row column", r"rules\[1\]: dims 'row column'"),
        ("formats.transformers", "formats.fused", "'fused' is memory's own format"),
        ("num_experts_keys = [", "num_experts_keys = [3, ", "expected a list of strings"),
        ("[tensors]", 'keep_dtype = ["gate"]\n[tensors]', "keep_dtype is .*names of tensors"),
        ("proof =", 'order = "size"\nproof =', "order is 'size'; expected names or modules"),
        ("[tensors]", "[tensors", "is not TOML"),
        ('= "megatron"', '= ["megatron"]', r"extends is \['megatron'\]; expected a format above"),
        ("transposed = true", 'transposed = "false"', "transposed is 'false'; expected true or"),
        (_DIMS, f'{_DIMS}\nsizes = {{row = "3"}}', "sizes.row is '3'; expected a number above 0"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_file_and_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = spec_text("mixtral")
    assert old in text
    text = text.replace(old, new)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(WeightConvertError, match=said) as caught:
        read_spec(path)
    assert str(path) in str(caught.value)
