from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weight_convert.files import Catalog, SourceTensor, read_catalog
from weight_convert.quantization.kept import is_safe


def parts(folder: Path, *names: str) -> tuple[Catalog, SourceTensor]:
    """The tensor whose parts, as in a distributed checkpoint, stand apart in a file."""
    numbers = {"a": 0.3, "b": 1e-45, "c": 7.0}
    save_file({key: torch.tensor([n]) for key, n in numbers.items()}, folder / "model.safetensors")
    catalog = read_catalog(folder)
    found = [catalog.tensors[name] for name in names]
    ranges = tuple((one.file, one.offset_bytes, one.size_bytes) for one in found)
    return catalog, replace(found[0], shape=(len(names),), size_bytes=4 * len(names), ranges=ranges)


@pytest.mark.parametrize(("names", "safe"), [("ac", True), ("ab", False), ("cab", False)])
def test_scales_that_stand_in_parts_are_read_where_these_stand(
    tmp_path: Path, names: str, safe: bool
) -> None:
    assert is_safe(*parts(tmp_path, *names)) == safe
