"""The tensors of one directory under the names of another one's format.

in_format_of(read_catalog("fused"), read_catalog("per_expert"))
"""

from weight_convert.files import Catalog
from weight_convert.outputs import PlannedTensor
from weight_convert.plan.completeness import check_complete
from weight_convert.plan.detection import detect_format, spec_of
from weight_convert.plan.regroup import as_stored, copied_in_memory
from weight_convert.specs import family_names


def in_format_of(catalog: Catalog, other: Catalog) -> dict[str, PlannedTensor]:
    """The tensors of `catalog`, in the format of `other` where theirs differ.

    Raises:
        UnknownFamilyError: their names differ, and `config.json` names no known family.
        IncompleteExpertsError: experts are missing.
        WeightConvertError: values would have to be computed.
    """
    if _stands_otherwise(catalog, other):
        family = spec_of(other, None)
        formats = detect_format(catalog, family), detect_format(other, family)
        if formats[0] != formats[1]:
            memory = copied_in_memory(catalog, family, formats[0])
            check_complete(catalog, family, memory)
            stored = as_stored(memory, family, formats[1], config=catalog.config)
            return {tensor.key: tensor for tensor in stored}
    return {key: PlannedTensor.of(tensor) for key, tensor in catalog.tensors.items()}


def _stands_otherwise(catalog: Catalog, other: Catalog) -> bool:
    """Whether they may be in two formats: other names, or other shapes in a known family."""
    if catalog.tensors.keys() != other.tensors.keys():
        return "model_type" in other.config
    return other.config.get("model_type") in family_names() and any(
        tensor.shape != other.tensors[key].shape for key, tensor in catalog.tensors.items()
    )
