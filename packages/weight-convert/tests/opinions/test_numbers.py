import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_convert import read_catalog
from weight_convert.opinions.numbers import first_number, unequal
from weight_convert.outputs import PlannedTensor
from weight_convert.staging import OpenFiles

_MANY = (1 << 20) + 7  # more than a chunk


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ([1.0, math.nan, -0.0], [1.0, math.nan, 0.0], None),
        ([1.0, math.nan], [1.0, 2.0], 1),
        ([math.inf, 1.0], [math.inf, 1.0 + 2**-20], 1),
        ([], [], None),
    ],
)
def test_nan_is_nan_and_zero_has_no_sign(a: list[float], b: list[float], first: int) -> None:
    assert unequal(torch.tensor(a), torch.tensor(b)) == first
    assert unequal(torch.tensor(a), torch.tensor(b).double()) == first


def test_tensors_in_several_chunks_and_dtypes_are_compared_by_numbers(
    oracle: Any, tmp_path: Path
) -> None:
    at = random.randrange(_MANY)
    ones = struct.pack("<H", 0x3F80) * _MANY
    wide = bytearray(struct.pack("<f", 1.0) * _MANY)
    shape = (_MANY,)
    oracle.write_folder(tmp_path / "a", [{"x": ("BF16", shape, ones)}], {})
    oracle.write_folder(tmp_path / "b", [{"x": ("F32", shape, bytes(wide))}], {})
    wide[4 * at : 4 * at + 4] = struct.pack("<f", 1.0 + 2**-23)
    oracle.write_folder(tmp_path / "c", [{"x": ("F32", shape, bytes(wide))}], {})
    catalogs = {name: read_catalog(tmp_path / name) for name in "abc"}
    tensors = {name: PlannedTensor.of(c.tensors["x"]) for name, c in catalogs.items()}
    for other, expected in (
        ("b", None),
        ("c", f"numbers differ from element {at} of {_MANY} on"),
    ):
        paths = [[tmp_path / name / "model.safetensors"] for name in ("a", other)]
        with OpenFiles(paths[0]) as left, OpenFiles(paths[1]) as right:
            assert first_number(tensors["a"], tensors[other], left, right) == expected
