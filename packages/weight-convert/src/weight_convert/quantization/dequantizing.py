"""Quantised weights to plain numbers.

report = dequantize("DeepSeek-V3", "DeepSeek-V3-bf16")
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weight_convert._dtypes import stored_dtype
from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import CONFIG_NAME, Catalog, LeftOut, SourceTensor, read_catalog
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.quantization.kept import KEPT_NAME, is_safe, kept_file
from weight_convert.quantization.methods import Method, method_of
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output


def dequantize(
    src: Path | str,
    dst: Path | str,
    *,
    dtype: str = "bfloat16",
    keep_scales: bool = True,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the model `src` with all weights in plain numbers into the new directory `dst`.

    Args:
        src: a model whose `config.json` has a `quantization_config` of fp8 in blocks, or mxfp4.
        dst: the output; must not exist.
        dtype: "bfloat16" or "float32".
        keep_scales: also write `quantization.kept`, by which `quantize` gives back every byte.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written.

    Raises:
        IncompleteExpertsError: codes without scales, or scales without codes.
        WeightConvertError: another quantisation, none, or a dtype that does not hold the weights.
        TargetExistsError, CorruptFileError, OSError: as `convert`.
    """
    if stored_dtype(dtype) == "F16":
        raise WeightConvertError("float16 does not hold all quantised weights; take bfloat16")
    catalog = read_catalog(src)
    entry = catalog.config.get("quantization_config")
    method = method_of(entry, catalog.directory / CONFIG_NAME)
    work = Computations(num_sources=len(catalog.files))
    tensors: list[PlannedTensor] = []
    kept: list[PlannedTensor] = []
    pairs = dict(_pairs(catalog, method))
    for key, tensor in catalog.tensors.items():
        if key not in pairs:
            if not method.are_scales(key):
                planned = PlannedTensor.of(tensor)
                tensors.append(replace(planned, order=(natural_key(key), 0, 0)))
            continue
        codes, scales = PlannedTensor.of(tensor), PlannedTensor.of(pairs[key])
        tensors.append(_decoded(codes, scales, method, stored_dtype(dtype), work))
        kept += [scales] if is_safe(catalog, pairs[key]) else [scales, codes]
    output = Output(
        tensors=tensors,
        work=work,
        sources=catalog.files,
        config={"dtype": dtype, "quantization_config": None},
        aside=(kept_file(kept, dict(entry or {})),) if keep_scales else (),
        not_carried=_former_kept(catalog),
    )
    return write_output(catalog, output, dst, options=options, on_progress=on_progress)


def _decoded(
    codes: PlannedTensor, scales: PlannedTensor, method: Method, dtype: str, work: Computations
) -> PlannedTensor:
    key = method.weight_of(codes.key)
    return work.add(
        method.decode(),
        (codes, scales),
        key=key,
        dtype=dtype,
        shape=method.weight_shape(codes.shape),
        order=(natural_key(key), 0, 0),
    )


def _former_kept(catalog: Catalog) -> tuple[LeftOut, ...]:
    if KEPT_NAME not in dict(catalog.carried):
        return ()
    return (LeftOut(name=KEPT_NAME, reason="kept scales of another quantisation"),)


def _pairs(catalog: Catalog, method: Method) -> Iterator[tuple[str, SourceTensor]]:
    """(name of codes, their scales); every one of either has the other."""
    used: set[str] = set()
    for key, tensor in catalog.tensors.items():
        if not method.are_codes(key, tensor.dtype):
            continue
        name = method.scale_of(key)
        scales = catalog.tensors.get(name)
        if scales is None:
            raise IncompleteExpertsError(
                f"{key} is quantised ({tensor.dtype}), but its scales {name} are missing; the "
                f"checkpoint is incomplete"
            )
        if len(tensor.shape) < (2 if method.name == "fp8" else 3):
            raise IncompleteExpertsError(
                f"{key} has shape {list(tensor.shape)}, which is no matrix in codes of "
                f"{method.name}; the checkpoint is damaged, or config.json is of another one"
            )
        weight = method.weight_shape(tensor.shape)
        expected = method.scales_shape(weight)
        if scales.shape != expected or method.codes_shape(weight) != tensor.shape:
            raise IncompleteExpertsError(
                f"{name} has shape {list(scales.shape)}, expected {list(expected)} for {key} "
                f"{list(tensor.shape)} in blocks of {list(method.block)} (config.json)"
            )
        used.add(name)
        yield key, scales
    alone = [key for key in catalog.tensors if method.are_scales(key) and key not in used]
    if alone:
        raise IncompleteExpertsError(
            f"{alone[0]} has no codes of {method.name} beside it; the checkpoint is incomplete or "
            f"its quantization_config is of another one"
        )
    if not used:
        raise WeightConvertError(
            f"{catalog.directory} has no tensor of {method.name}, although its config says so"
        )
