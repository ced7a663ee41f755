import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from weight_convert import verify
from weight_convert.errors import WeightConvertError
from weight_convert.specs import get_spec


def test_forms_and_files_do_not_matter(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "transformers", num_files=3)
    b = model.write(tmp_path / "b", "fused")
    report = verify(a, b)
    assert report.equal, model.seed
    assert report.formats == ("transformers", "fused")
    assert report.num_tensors == len(model.fused)
    assert report.compared_bytes == sum(len(data) for _, _, data in model.fused.values())


@pytest.mark.parametrize("form", ["transformers", "fused"])
def test_one_flipped_bit_is_found_and_named(
    oracle: Any, model: Any, tmp_path: Path, form: str
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    a = model.write(tmp_path / "a", "transformers", num_files=2)
    tensors = model.per_expert if form == "transformers" else model.fused
    key = rng.choice([key for key, value in tensors.items() if value[2]])
    dtype, shape, data = tensors[key]
    at = rng.randrange(len(data))
    tensors[key] = (
        dtype,
        shape,
        data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
    )
    report = verify(a, model.write(tmp_path / "b", form))
    (difference,) = report.differences
    assert "bytes differ from byte" in difference.detail, (seed, model.seed)
    if form == "transformers" or "experts" not in key:
        assert difference.key == key
        assert difference.detail == f"bytes differ from byte {at} of {len(data)} on"
    else:
        assert difference.key == key, (seed, model.seed)


def test_two_experts_that_changed_places_are_found(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "transformers")
    one, two = (f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (2, 10))
    tensors = model.per_expert
    tensors[one], tensors[two] = tensors[two], tensors[one]
    report = verify(a, model.write(tmp_path / "b", "transformers"))
    assert [difference.key for difference in report.differences] == [one, two]


def test_missing_added_and_reshaped_tensors_are_named(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "fused")
    del model.per_expert["model.norm.weight"]
    model.per_expert["new"] = ("U8", (1,), b"x")
    dtype, shape, data = model.per_expert["lm_head.weight"]
    model.per_expert["lm_head.weight"] = (dtype, shape[::-1], data)
    model.per_expert["model.mtp.unheard_of"] = ("F64", (3,), bytes(24))
    report = verify(a, model.write(tmp_path / "b", "transformers"))
    assert {difference.key: difference.detail for difference in report.differences} == {
        "lm_head.weight": "BF16 [7, 10] against BF16 [10, 7]",
        "model.mtp.unheard_of": "I64 [3] against F64 [3]",
        "model.norm.weight": "only in the first directory",
        "new": "only in the second directory",
    }
    assert not report.equal


def test_blocks_of_large_tensors_are_all_compared(oracle: Any, tmp_path: Path) -> None:
    data = os.urandom(1_000_003)
    other = data[:-1] + bytes([data[-1] ^ 1])
    config = {"model_type": "qwen3_moe"}
    oracle.write_folder(tmp_path / "a", [{"x": ("U8", (len(data),), data)}], config)
    oracle.write_folder(tmp_path / "b", [{"x": ("U8", (len(data),), other)}], config)
    assert verify(tmp_path / "a", tmp_path / "a").equal
    (difference,) = verify(tmp_path / "a", tmp_path / "b").differences
    assert difference.detail == "bytes differ from byte 1000002 of 1000003 on"


def test_one_config_is_enough_and_a_known_family_is_not_needed(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "transformers")
    b = model.write(tmp_path / "b", "fused")
    (a / "config.json").unlink()
    assert verify(a, b).equal
    assert verify(b, a).equal
    (b / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    report = verify(a, b)  # of a family that is not known: as they stand
    assert (report.formats, report.equal) == ((), False)
    assert verify(a, a).equal
    assert verify(b, b).equal
    with pytest.raises(WeightConvertError, match=r"config\.json is of model_type 'gpt2'"):
        verify(a, b, spec=get_spec("qwen3_moe"))


def test_directories_of_two_families_are_refused_before_anything_is_loaded(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    a = model.write(tmp_path / "a", "transformers")
    oracle.write_folder(tmp_path / "b", [{"x": ("U8", (1,), b"x")}], {"model_type": "gemma"})
    for level in ("bytes", "logits"):
        with pytest.raises(WeightConvertError, match=r"'qwen3_moe' and .*b of 'gemma'; compare"):
            verify(a, tmp_path / "b", level=level)


def test_headers_alone_say_nothing_of_bytes(model: Any, tmp_path: Path) -> None:
    a = model.write(tmp_path / "a", "transformers")
    dtype, shape, data = model.fused["lm_head.weight"]
    model.fused["lm_head.weight"] = (dtype, shape, bytes(len(data)))
    b = model.write(tmp_path / "b", "fused")
    report = verify(a, b, level="headers")
    assert (report.equal, report.compared_bytes) == (True, 0)
    assert not verify(a, b).equal
    model.fused["lm_head.weight"] = (dtype, shape[::-1], data)
    assert not verify(a, model.write(tmp_path / "c", "fused"), level="headers").equal
