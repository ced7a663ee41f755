"""mesh-spmd's `layout` reads headers by itself: held against files of the safetensors library."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mesh_spmd.cli import main

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def test_every_dtype_has_its_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(4, 6).to(dtype) for dtype in DTYPES}
    some, others = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    save_file(some, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file(others, tmp_path / "model-2.safetensors")
    assert main(["layout", str(tmp_path), "--mesh", "ep=4", "--rule", "*:ep=0", "--json"]) == 0
    *rows, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert {row["name"]: row["dtype"] for row in rows} == {
        str(dtype): name for dtype, name in DTYPES.items()
    }
    assert {tuple(row["shape"]) for row in rows} == {(4, 6)}
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert total["bytes_of_ranks"] == {str(rank): held // 4 for rank in range(4)}
