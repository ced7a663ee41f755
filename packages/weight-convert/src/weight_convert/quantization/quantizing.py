"""Plain weights to codes and scales: by scales that were kept, or by fresh ones.

report = quantize("DeepSeek-V3-bf16", "DeepSeek-V3-again")
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weight_convert._checks import check_kind
from weight_convert._dtypes import FLOATS, MAMBA, takes_fp8
from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import Catalog, LeftOut, SourceTensor, read_catalog
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan import spec_of, stored_roles
from weight_convert.quantization.kept import KEPT_NAME, Kept, read_kept
from weight_convert.quantization.methods import Method, fp8, method_of, mxfp4
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output
from weight_convert.specs import FamilySpec

_LAYER_STEM = re.compile(r"(.*?layers\.\d+)\.")


def quantize(
    src: Path | str,
    dst: Path | str,
    *,
    to: str | None = None,
    skip: Sequence[str] = (),
    spec: FamilySpec | None = None,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the model `src` with its large weights in codes and scales into the directory `dst`.

    Args:
        src: a model in bfloat16, float16 or float32, in any format of its family.
        dst: the output; must not exist.
        to: "fp8" (in blocks of 128 x 128) or "mxfp4" makes fresh scales: of all matrices of layers
            but routers and Mamba's, or of GPT-OSS's experts. None takes the scales that
            `dequantize` kept in `src`, and gives back every byte of weights that are unchanged.
        skip: patterns of tensors to leave as they are, such as "*.o_proj.weight"; each must match,
            and of a layer's experts all or none.
        spec: the family, which says what is a router; None takes it from `config.json`.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written.

    Raises:
        WeightConvertError: no kept scales, or they are of other tensors; nothing to quantise; a
            weight that is not finite.
        TargetExistsError, CorruptFileError, UnknownFamilyError, OSError: as `convert`.
    """
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec or None")
    catalog = read_catalog(src)
    kept = read_kept(catalog)
    if to is None:
        if kept is None:
            raise WeightConvertError(
                f"{catalog.directory} has no {KEPT_NAME}; choose to='fp8' or 'mxfp4' (--to) for "
                f"fresh scales"
            )
        if skip:
            raise WeightConvertError("skip chooses among fresh scales; kept ones are all taken")
        return _by_kept(catalog, kept, dst, options, on_progress)
    family = spec_of(catalog, spec)
    method = _method(to, family)
    chosen, plain = _chosen(catalog, method, family, skip)
    work = Computations(num_sources=len(catalog.files))
    tensors = [_plain(tensor) for key, tensor in catalog.tensors.items() if key not in chosen]
    for key in chosen:
        tensors += _encoded(catalog.tensors[key], method, work)
    output = Output(
        tensors=tensors,
        work=work,
        sources=catalog.files,
        config={"quantization_config": _entry(method, plain)},
        not_carried=() if kept is None else (_kept_left_out("fresh scales take their place"),),
    )
    return write_output(catalog, output, dst, options=options, on_progress=on_progress)


def _method(to: str, family: FamilySpec) -> Method:
    if to not in ("fp8", "mxfp4"):
        raise WeightConvertError(f"to={to!r}; expected 'fp8', 'mxfp4' or None")
    expert = family.tensors.get(family.experts[0])
    if to == "mxfp4" and (expert is None or expert.dims[1:2] != ("hidden",)):
        raise WeightConvertError(
            f"mxfp4 is read of experts that stand fused with their inputs as rows, as GPT-OSS's, "
            f"which those of {family.model_type} do not; choose fp8"
        )
    return fp8((128, 128)) if to == "fp8" else mxfp4()


def _kept_left_out(reason: str) -> LeftOut:
    return LeftOut(name=KEPT_NAME, reason=reason)


def _order(key: str, part: int = 0) -> tuple[tuple[tuple[int, str, int], ...], int, int]:
    return natural_key(key), part, 0


def _plain(tensor: SourceTensor) -> PlannedTensor:
    return replace(PlannedTensor.of(tensor), order=_order(tensor.key))


def _encoded(tensor: SourceTensor, method: Method, work: Computations) -> Iterator[PlannedTensor]:
    """Codes and fresh scales of a weight."""
    weight = PlannedTensor.of(tensor)
    yield work.add(
        method.encode("codes"),
        (weight,),
        key=tensor.key + method.codes_suffix,
        dtype=method.codes_dtype,
        shape=method.codes_shape(tensor.shape),
        order=_order(tensor.key),
    )
    yield work.add(
        method.encode("scales"),
        (weight,),
        key=tensor.key + method.scales_suffix,
        dtype=method.scales_dtype(),
        shape=method.scales_shape(tensor.shape),
        order=_order(tensor.key, 1),
    )


def _chosen(
    catalog: Catalog, method: Method, spec: FamilySpec, skip: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the stored weights to quantise, and of the modules that stay plain."""
    roles = stored_roles(catalog, spec)
    modules = {
        key: _module(key, name)
        for key, (role, name) in roles.items()
        if catalog.tensors[key].dtype in FLOATS
        and takes_fp8(name, role, catalog.tensors[key].shape)
        and (method.name == "fp8" or name in spec.experts)
    }
    for pattern in skip:
        if not any(fnmatchcase(key, pattern) for key in modules):
            raise WeightConvertError(f"skip={pattern!r} matches no tensor that would be quantised")
    chosen = tuple(key for key in modules if not any(fnmatchcase(key, item) for item in skip))
    if not chosen:
        raise WeightConvertError(
            f"{catalog.directory} has no plain weight that {method.name} is for"
        )
    for key in chosen:
        why = method.refusal(catalog.tensors[key].shape)
        if why:
            raise WeightConvertError(f"{key} cannot be {method.name}: {why}; skip it (--skip)")
    taken = set(chosen)
    of_chosen = {modules[key]: key for key in chosen}
    plain = dict.fromkeys(modules[key] for key in modules if key not in taken)
    for module in plain:
        if module in of_chosen:
            raise WeightConvertError(
                f"skip leaves a part of {module} as it is, but not {of_chosen[module]}; these are "
                f"one module, of which a config can only say that all of it is quantised: skip all "
                f"of it, or nothing"
            )
    mamba = {_module(key, name) for key, (_, name) in roles.items() if MAMBA in name}
    mamba = {f"{module}.".partition(MAMBA)[0] + ".mamba" for module in mamba}
    return chosen, (*plain, *sorted(mamba), *_of_other_parts(catalog, roles))


def _of_other_parts(catalog: Catalog, roles: Mapping[str, tuple[str, str]]) -> list[str]:
    """Modules with matrices that no role is for, such as a vision tower's.

    transformers would take these for codes, too, and make up their scales.
    """
    found = {
        key.rpartition(".")[0]
        for key, tensor in catalog.tensors.items()
        if roles.get(key, ("other", ""))[0] == "other"
        and tensor.dtype in FLOATS
        and len(tensor.shape) > 1
        and key.endswith(".weight")
    }
    return sorted(found, key=natural_key)


def _module(key: str, name: str) -> str:
    """The module in memory of a stored tensor whose template in memory is `name`."""
    layer = _LAYER_STEM.match(key)
    if layer is not None and name.count("{") == name.count("{layer}") == 1:
        key = name.format(layer=layer[1])
    return key.rpartition(".")[0]


def _entry(method: Method, plain: Sequence[str]) -> Mapping[str, Any]:
    """The `quantization_config` of fresh scales; `plain` are modules without."""
    if method.name == "mxfp4":
        others = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        others += ["model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*others, *plain]}
    entry: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(method.block),
    }
    if plain:
        entry["modules_to_not_convert"] = ["lm_head", *plain]
    return entry


def _by_kept(
    catalog: Catalog,
    kept: Kept,
    dst: Path | str,
    options: OutputOptions | None,
    on_progress: Progress | None,
) -> Report:
    """Quantise by kept scales."""
    method = method_of(kept.config, catalog.directory / KEPT_NAME)
    work = Computations(num_sources=len(catalog.files) + 1)
    scales = {
        key.removesuffix(method.scales_suffix): tensor
        for key, tensor in kept.tensors.items()
        if method.are_scales(key)
    }
    _check_weights(catalog, scales, method)
    tensors = [_plain(tensor) for key, tensor in catalog.tensors.items() if key not in scales]
    for key, scale in scales.items():
        weight = catalog.tensors[key]
        former = kept.tensors.get(key + method.codes_suffix)
        inputs = [weight, scale] if former is None else [weight, scale, former]
        codes = work.add(
            method.encode("codes"),
            (PlannedTensor.of(tensor) for tensor in inputs),
            key=key + method.codes_suffix,
            dtype=method.codes_dtype,
            shape=method.codes_shape(weight.shape),
            order=_order(key),
        )
        tensors += [codes, replace(PlannedTensor.of(scale), order=_order(key, 1))]
    output = Output(
        tensors=tensors,
        work=work,
        sources=(*catalog.files, KEPT_NAME),
        config={"quantization_config": dict(kept.config)},
        not_carried=(_kept_left_out("the scales stand beside their weights again"),),
    )
    return write_output(catalog, output, dst, options=options, on_progress=on_progress)


def _check_weights(catalog: Catalog, scales: Mapping[str, SourceTensor], method: Method) -> None:
    """Raise unless each of the scales fits a weight."""
    for key, scale in scales.items():
        weight = catalog.tensors.get(key)
        if weight is None:
            raise IncompleteExpertsError(
                f"{KEPT_NAME} has the scales {scale.key}, but there is no {key}; convert back to "
                f"the format that the model was dequantised in, or make fresh scales (--to)"
            )
        if method.refusal(weight.shape) or scale.shape != method.scales_shape(weight.shape):
            raise IncompleteExpertsError(
                f"{scale.key} in {KEPT_NAME} has shape {list(scale.shape)}, which {key} "
                f"{list(weight.shape)} does not have in blocks of {list(method.block)}"
            )
        if weight.dtype not in ("BF16", "F32"):
            raise WeightConvertError(
                f"{key} is {weight.dtype}; kept scales are for BF16 and F32, make fresh ones (--to)"
            )
