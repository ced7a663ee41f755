"""Merge models: which tensors belong together, and what is made of them.

    config = MergeConfig(method="linear", models=(MergeModel(path="a"), MergeModel(path="b")))
    merge(config, "dst")

Models must have the same tensors, of the same shapes. One that stores experts in another format of
the family is read by its spec, and the output has the format of the base or first model. What is no
floating-point number is copied from there, too.
"""

import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from weight_convert._checks import check_kind
from weight_convert._dtypes import FLOATS, stored_dtype
from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.files import Catalog, read_catalog
from weight_convert.merging.config import PASSTHROUGH, MergeConfig, amount_at
from weight_convert.merging.layers_config import num_layers, stacked_config
from weight_convert.merging.stacking import stacked
from weight_convert.operations import Combine
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan import in_format_of, stored_roles
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output
from weight_convert.specs import get_spec

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_Tensors = Mapping[str, PlannedTensor]


def merge(
    config: MergeConfig,
    dst: Path | str,
    *,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Merge models into the new directory `dst`.

    Args:
        config: which models, and how.
        dst: the output; must not exist. Its other files are those of the base or first model.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written, and what `remove_keys` left out.

    Raises:
        WeightConvertError: models of different tensors, quantised ones, or a pattern that matches
            nothing.
        TargetExistsError, CorruptFileError, OSError: as `convert`.
    """
    check_kind(config, MergeConfig, "config must be a MergeConfig; read_config reads one")
    models = [read_catalog(path) for path in _paths(config)]
    sources = tuple(
        str(model.directory.absolute() / name) for model in models for name in model.files
    )
    work = Computations(num_sources=len(sources))
    aligned = _aligned(models)
    removed = _remove(aligned, config)
    changes: dict[str, object] = {} if config.dtype is None else {"dtype": config.dtype}
    kept = _kept_in_dtype(models[0])
    if config.method == PASSTHROUGH:
        counts = [num_layers(model.config) for model in models]
        tensors = [
            work.cast(tensor, dtype) if dtype != tensor.dtype else tensor
            for tensor in stacked(config.slices, aligned, counts)
            for dtype in (_dtype_of(tensor, config, kept),)
        ]
        changes |= stacked_config(config.slices, [model.config for model in models])
    else:
        tensors = list(_combined(config, aligned, kept, work))
    output = Output(tensors=tensors, work=work, sources=sources, config=changes, removed=removed)
    return write_output(models[0], output, dst, options=options, on_progress=on_progress)


def _paths(config: MergeConfig) -> list[str]:
    """Directories in the order of the operation's inputs."""
    if config.method == PASSTHROUGH:
        return [part.path for part in config.slices]
    return ([config.base] if config.base is not None else []) + [m.path for m in config.models]


def _aligned(models: Sequence[Catalog]) -> list[dict[str, PlannedTensor]]:
    """The tensors of each model under the names of the first one's format, over all files."""
    first, aligned, num_files = models[0], list[dict[str, PlannedTensor]](), 0
    for model in models:
        if model.config.get("model_type") != first.config.get("model_type"):
            raise WeightConvertError(
                f"{model.directory} is of model_type {model.config.get('model_type')!r}, but "
                f"{first.directory} of {first.config.get('model_type')!r}"
            )
        found = in_format_of(model, first)
        aligned.append({key: tensor.behind(num_files) for key, tensor in found.items()})
        num_files += len(model.files)
    return aligned


def _remove(models: Sequence[dict[str, PlannedTensor]], config: MergeConfig) -> dict[str, int]:
    """Take the tensors that `remove_keys` names from all models; those of the first, with bytes."""
    removed: dict[str, int] = {}
    for pattern in config.remove_keys:
        found = {key for model in models for key in model if fnmatchcase(key, pattern)}
        if not found:
            raise WeightConvertError(f"remove_keys: {pattern!r} matches no tensor of any model")
        for model in models:
            for key in found & model.keys():
                removed.setdefault(key, model[key].size_bytes)
                del model[key]
    return {key: removed[key] for key in sorted(removed, key=natural_key)}


def _kept_in_dtype(model: Catalog) -> frozenset[str]:
    """Names of tensors that no cast touches, of all layers as one; none of unknown families."""
    try:
        spec = get_spec(str(model.config.get("model_type")))
    except UnknownFamilyError:
        return frozenset()
    roles = stored_roles(model, spec)
    return frozenset(_of_any_layer(key) for key in roles if spec.keeps_dtype(roles[key][1]))


def _of_any_layer(key: str) -> str:
    return _LAYER.sub(".layers.*.", key)


def _dtype_of(tensor: PlannedTensor, config: MergeConfig, kept: Collection[str]) -> str:
    """The dtype in the output: some keep theirs, as the bias that chooses experts needs it."""
    is_kept = tensor.dtype not in FLOATS or _of_any_layer(tensor.key) in kept
    return tensor.dtype if config.dtype is None or is_kept else stored_dtype(config.dtype)


def _combined(
    config: MergeConfig,
    models: Sequence[_Tensors],
    kept: Collection[str],
    work: Computations,
) -> Iterator[PlannedTensor]:
    """Each tensor of the output."""
    first, *others = models
    _check_same(config, models)
    last_layer = max((_layer(key) or 0 for key in first), default=0)
    for key in sorted(first, key=natural_key):
        layer = _layer(key)
        place = layer / max(last_layer, 1) if layer is not None else float(_is_behind(key))
        tensor = first[key]
        if tensor.dtype not in FLOATS:
            yield replace(tensor, order=(natural_key(key), 0, 0))
            continue
        yield work.add(
            _operation(config, key, place),
            (tensor, *(model[key] for model in others)),
            key=key,
            dtype=_dtype_of(tensor, config, kept),
            shape=tensor.shape,
            order=(natural_key(key), 0, 0),
        )


def _layer(key: str) -> int | None:
    match = _LAYER.search(key)
    return int(match[1]) if match else None


def _is_behind(key: str) -> bool:
    """Whether a tensor outside of the layers stands behind them: all but embeddings do."""
    return "embed" not in key


def _check_same(config: MergeConfig, models: Sequence[_Tensors]) -> None:
    """Raise unless all models have the same tensors, and those can be merged."""
    paths, first = _paths(config), models[0]
    for path, model in zip(paths, models, strict=True):
        for key in sorted(first.keys() ^ model.keys(), key=natural_key):
            owner = paths[0] if key in first else path
            raise WeightConvertError(
                f"{key} is in {owner} only; models to merge must have the same tensors, so remove "
                f"it (remove_keys) or add it to all"
            )
        for key, tensor in model.items():
            if tensor.shape != first[key].shape:
                raise WeightConvertError(
                    f"{key} has shape {list(tensor.shape)} in {path}, but "
                    f"{list(first[key].shape)} in {paths[0]}"
                )
            if tensor.dtype.startswith("F8") or key.endswith(("_scale_inv", "_blocks")):
                raise WeightConvertError(f"{key} in {path} is quantised; dequantise {path} first")
            if (tensor.dtype in FLOATS) != (first[key].dtype in FLOATS):
                raise WeightConvertError(
                    f"{key} is {tensor.dtype} in {path}, but {first[key].dtype} in {paths[0]}"
                )


def _operation(config: MergeConfig, key: str, place: float) -> Combine:
    models = config.models
    weights = tuple(amount_at(m.weight, key, place, f"weight of {m.path}") for m in models)
    if config.method == "slerp":
        t = amount_at(config.t, key, place, "t")
        weights = (1 - t, t)
    densities = tuple(amount_at(m.density, key, place, f"density of {m.path}") for m in models)
    for model, density in zip(models, densities, strict=True):
        if not 0 < density <= 1:
            raise WeightConvertError(
                f"density of {model.path} is {density} at {key}; expected above 0, at most 1"
            )
    if config.normalizes and abs(sum(weights)) < 1e-8:
        raise WeightConvertError(
            f"the weights at {key} sum to 0; give others, or set normalize to false"
        )
    return Combine(
        method=config.method,
        weights=weights,
        densities=densities if Combine.METHODS[config.method] else (),
        scale=config.scale,
        normalize=config.normalizes,
        gamma=config.gamma,
        epsilon=config.epsilon,
        seed=zlib.crc32(f"{config.seed} {key}".encode()),
    )
