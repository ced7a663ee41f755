"""The tensor of one command line: its shape, dtype and layouts before and after.

parse_dtype("BF16", where="--dtype")                        # torch.bfloat16
make_pair((64, 512), torch.float32, ("ep=8/ep=0", "ep=4"))  # two TensorSpec
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mesh_spmd.commands.layouts import parse_layout
from mesh_spmd.commands.options import parse_shape
from mesh_spmd.errors import MeshSpmdError, MeshValueError

if TYPE_CHECKING:
    import torch

    from mesh_spmd.layout import TensorSpec

_STORED = {  # safetensors' names of dtypes
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}


def add_layouts(parser: argparse.ArgumentParser) -> None:
    """The two layouts of every command about a change of layout."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", nargs="?", help="the layout before, as in dp=2,ep=8/ep=0")
    parser.add_argument("target", nargs="?", help="the layout after")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """The dtype of the tensor."""
    parser.add_argument("--dtype", help="dtype of the tensor: bfloat16 (default), float32, BF16")


def pair_of_line(arguments: argparse.Namespace) -> tuple[TensorSpec, TensorSpec]:
    """Return the tensor of the command line before and after.

    Raises:
        MeshValueError: a layout is missing, or something cannot be read.
    """
    for name in ("source", "target"):
        if getattr(arguments, name) is None:
            raise MeshValueError(f"the {name} layout is missing; give two, as in ep=8/ep=0 ep=4")
    dtype = parse_dtype(arguments.dtype or "bfloat16", where="--dtype")
    shape = parse_shape(arguments.shape)
    return make_pair(shape, dtype, (arguments.source, arguments.target))


def make_pair(
    shape: tuple[int, ...], dtype: torch.dtype, layouts: tuple[str, ...]
) -> tuple[TensorSpec, TensorSpec]:
    """Return a tensor in the two layouts that texts say.

    Raises:
        MeshValueError: a layout cannot be read, or does not fit the shape.
    """
    source, target = (
        _tensor(shape, dtype, text, what)
        for text, what in zip(layouts, ("source", "target"), strict=True)
    )
    return source, target


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, text: str, what: str) -> TensorSpec:
    from mesh_spmd.layout import TensorSpec

    layout = parse_layout(text, what=what)
    try:
        return TensorSpec(shape, dtype, layout)
    except MeshSpmdError as error:
        raise type(error)(f"the {what} layout {text!r}: {error}") from error


def parse_dtype(name: object, *, where: str) -> torch.dtype:
    """Return the dtype of a name of torch's or of safetensors'; `where` is named in errors."""
    import torch

    found = getattr(torch, _STORED.get(name, name), None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise MeshValueError(
            f"{where} got {name!r}; give a dtype of torch, as in float32, or of safetensors, F32"
        )
    return found
