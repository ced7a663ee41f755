"""Put an adapter into a model's weights.

    lora("Qwen3-30B-A3B", "my-lora", "merged")

Adapters name modules, as the trained model had them; the model's directory must store weights under
these names. An adapter of single experts goes into the format `transformers`, one of fused experts
(peft's `target_parameters`) into `fused`; `convert` leads from one to the other.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weight_convert._dtypes import FLOATS
from weight_convert.adapters.adapter import Adapter, Factors, read_adapter
from weight_convert.errors import WeightConvertError
from weight_convert.files import Catalog, SourceTensor, read_catalog
from weight_convert.operations import AddLowRank
from weight_convert.outputs import Computations, PlannedTensor, natural_key
from weight_convert.plan import spec_of
from weight_convert.run import Output, OutputOptions, Progress, Report, write_output

_INNER = ".base_layer"
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def lora(
    src: Path | str,
    adapter: Path | str,
    dst: Path | str,
    *,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the model `src` with an adapter merged into it into the new directory `dst`.

    Args:
        src: the model that the adapter was trained on.
        adapter: a directory with `adapter_config.json` and `adapter_model.safetensors`: LoRA,
            rsLoRA or DoRA of linear layers, LoRA or rsLoRA of embeddings and fused experts.
        dst: the output; must not exist.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written; `num_computed` tensors were changed.

    Raises:
        WeightConvertError: a part of the adapter that fits no tensor of the model, or a variant
            that is not known.
        TargetExistsError, CorruptFileError, OSError: as `convert`.
    """
    catalog = read_catalog(src)
    found = _without_tied_head(catalog, read_adapter(adapter))
    sources = (*catalog.files, str(found.path.absolute()))
    work = Computations(num_sources=len(sources))
    untied = _untied(catalog, found)
    # What becomes a tensor of its own changes none that is stored.
    apart = {tensor.key for tensor in untied}
    others = {key: tensor for key, tensor in found.replaced.items() if key not in apart}
    changed = dict(_changed(catalog, replace(found, replaced=others), work))
    tensors = [
        changed.get(key) or replace(PlannedTensor.of(tensor), order=(natural_key(key), 0, 0))
        for key, tensor in catalog.tensors.items()
    ]
    config = {"tie_word_embeddings": False} if untied else {}
    output = Output(tensors=[*tensors, *untied], work=work, sources=sources, config=config)
    return write_output(catalog, output, dst, options=options, on_progress=on_progress)


def _tied_embedding(catalog: Catalog) -> SourceTensor | None:
    """The embedding that is the head's weight too, where it is stored as one."""
    if catalog.config.get("tie_word_embeddings") is not True or _HEAD in catalog.tensors:
        return None
    return next((t for key, t in catalog.tensors.items() if key.endswith(_EMBEDDING)), None)


def _without_tied_head(catalog: Catalog, adapter: Adapter) -> Adapter:
    """The adapter without the head that peft stores again where it was trained as the embedding."""
    embedding = _tied_embedding(catalog)
    if embedding is None or not adapter.keeps_tied or embedding.key not in adapter.replaced:
        return adapter
    replaced = {key: tensor for key, tensor in adapter.replaced.items() if key != _HEAD}
    return replace(adapter, replaced=replaced)


def _untied(catalog: Catalog, adapter: Adapter) -> tuple[PlannedTensor, ...]:
    """The head of a model that stores none, where the adapter replaces it or the embedding alone.

    Tied again, the other one would change with it, which it did not in training.
    """
    embedding = _tied_embedding(catalog)
    if embedding is None or adapter.keeps_tied:
        return ()
    modules = {key.removesuffix(".weight") for key in (_HEAD, embedding.key)}
    if modules & adapter.factors.keys() or not {_HEAD, embedding.key} & adapter.replaced.keys():
        return ()
    head, planned = adapter.replaced.get(_HEAD), PlannedTensor.of(embedding)
    if head is not None and head.shape != embedding.shape:
        raise _unfitting(adapter, head, catalog)
    if head is not None:
        planned = PlannedTensor.of(head).behind(len(catalog.files))
    return (replace(planned, key=_HEAD, order=(natural_key(_HEAD), 0, 0)),)


def _changed(
    catalog: Catalog, adapter: Adapter, work: Computations
) -> Iterator[tuple[str, PlannedTensor]]:
    num_files = len(catalog.files)
    taken: set[str] = set()
    for module, factors in adapter.factors.items():
        weight, num_experts, is_transposed = _target(catalog, module, factors, taken)
        taken.add(weight.key)
        rank = factors.a.shape[0] // (num_experts or 1)
        name = weight.key if num_experts or adapter.is_parameter(weight.key) else module
        whole = adapter.replaced.get(weight.key)
        if whole is not None and (whole.shape, whole.dtype) != (weight.shape, weight.dtype):
            raise _unfitting(adapter, whole, catalog)
        former = PlannedTensor.of(weight)
        if whole is not None:
            former = PlannedTensor.of(whole).behind(num_files)
        parts = [factors.a, factors.b] + ([factors.magnitude] if factors.magnitude else [])
        yield (
            weight.key,
            work.add(
                AddLowRank(
                    scaling=factors.scaling(rank, name),
                    num_experts=num_experts,
                    is_transposed=is_transposed,
                ),
                [former] + [PlannedTensor.of(p).behind(num_files) for p in parts],
                key=weight.key,
                dtype=weight.dtype,
                shape=weight.shape,
                order=(natural_key(weight.key), 0, 0),
            ),
        )
    for key, tensor in adapter.replaced.items():
        stored = catalog.tensors.get(key)
        if stored is None or stored.shape != tensor.shape:
            raise _unfitting(adapter, tensor, catalog)
        if key in taken:
            continue
        planned = PlannedTensor.of(tensor).behind(num_files)
        yield key, replace(planned, key=key, order=(natural_key(key), 0, 0))


def _unfitting(adapter: Adapter, tensor: SourceTensor, catalog: Catalog) -> WeightConvertError:
    return WeightConvertError(
        f"{adapter.path} has {tensor.key} ({tensor.dtype} {list(tensor.shape)}), which fits no "
        f"tensor of {catalog.directory}; it was trained on another model, or in another dtype"
    )


def _target(
    catalog: Catalog, module: str, factors: Factors, taken: set[str]
) -> tuple[SourceTensor, int, bool]:
    """The weight that factors belong to, its number of experts, and whether it is transposed."""
    weight = catalog.tensors.get(f"{module}.weight")
    into, out = factors.a.shape[-1], factors.b.shape[0]
    if weight is not None:
        is_transposed = factors.is_embedding
        if weight.shape != ((into, out) if is_transposed else (out, into)):
            raise WeightConvertError(
                f"the adapter of {module} is for [{out}, {into}], but {weight.key} has shape "
                f"{list(weight.shape)}; it was trained on another model"
            )
        return checked_weight(weight), 0, is_transposed
    is_transposed = are_transposed(catalog)
    while module.endswith(_INNER):
        module = module.removesuffix(_INNER)
    shape = (into, out) if is_transposed else (out, into)
    fitting = [
        tensor
        for key, tensor in catalog.tensors.items()
        if key.rpartition(".")[0] == module and tensor.shape[1:] == shape and key not in taken
    ]
    if len(fitting) != 1:
        listed = ", ".join(tensor.key for tensor in fitting) or "no tensor"
        raise WeightConvertError(
            f"the adapter of {module} ({into} to {out} features) fits {listed} of "
            f"{catalog.directory}, expected one. Adapters of single experts need the format "
            f"transformers, those of fused ones fused: convert the model first (convert --to)"
        )
    (tensor,) = fitting
    if tensor.shape[0] < 1 or factors.a.shape[0] % tensor.shape[0] or factors.magnitude:
        raise WeightConvertError(
            f"the adapter of {module} has {factors.a.shape[0]} rows in A, which is no multiple of "
            f"the {tensor.shape[0]} experts of {tensor.key}, or is DoRA, which fused experts have "
            f"not"
        )
    return checked_weight(tensor), tensor.shape[0], is_transposed


def are_transposed(catalog: Catalog) -> bool:
    """Whether fused experts have their inputs as rows: by the family's spec, not by shapes."""
    family = spec_of(catalog, None)
    return family.tensors[family.experts[0]].dims[1] == "hidden"


def checked_weight(weight: SourceTensor) -> SourceTensor:
    """The weight, unless it holds codes."""
    if weight.dtype not in FLOATS:
        raise WeightConvertError(f"{weight.key} is {weight.dtype}; dequantise the model first")
    return weight
