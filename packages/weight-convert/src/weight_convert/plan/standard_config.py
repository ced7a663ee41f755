"""What a `config.json` must say so that transformers reads weights that came from another program.

standard_config(catalog, spec, tensors)     # {"architectures": ["Qwen2MoeForCausalLM"], ...}
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from weight_convert._dtypes import TORCH_NAMES, stored_dtype
from weight_convert.files import Catalog
from weight_convert.outputs import PlannedTensor
from weight_convert.specs import FamilySpec

_CAUSAL = "ForCausalLM"
_FP8 = "F8_E4M3"


def standard_config(
    catalog: Catalog, spec: FamilySpec, tensors: Sequence[PlannedTensor]
) -> dict[str, Any]:
    """Entries to change; none where there is no `config.json` or it says all of them.

    The architecture's standard name (other programs have names of their own for it, such as
    Paddle's `...ForCausalLMPipe`; those of other heads stay), the family, the dtype of most
    parameters, and how fp8 codes with scales beside them are quantised.

    Args:
        catalog: the source.
        spec: its family.
        tensors: in memory.
    """
    config, changes = catalog.config, dict[str, Any]()
    if not config:
        return changes
    named = config.get("architectures")
    names = named if isinstance(named, list) and named else [_CAUSAL]
    if names != [spec.architecture] and all(_CAUSAL in str(name) for name in names):
        changes["architectures"] = [spec.architecture]
    if "model_type" not in config:
        changes["model_type"] = spec.model_type
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size_bytes
    found = max(TORCH_NAMES, key=lambda name: sizes[stored_dtype(name)])
    known = spec.config_of(config)
    if sizes[stored_dtype(found)] and "dtype" not in known and "torch_dtype" not in known:
        changes["dtype"] = found
    block = _block(spec, tensors)
    if block and "quantization_config" not in config:
        changes["quantization_config"] = {
            "activation_scheme": "dynamic",
            "quant_method": "fp8",
            "weight_block_size": block,
        }
    return changes


def _block(spec: FamilySpec, tensors: Sequence[PlannedTensor]) -> list[int] | None:
    """Rows and columns of one scale, where a tensor has enough of both to tell; 128 otherwise."""
    by_key = {tensor.key: tensor for tensor in tensors}
    found = None
    for tensor in tensors:
        scales = [by_key[tensor.key + end] for end in spec.companions if tensor.key + end in by_key]
        if tensor.dtype != _FP8 or not scales:
            continue
        found = found or [128, 128]
        pairs = list(zip(tensor.shape[-2:], scales[0].shape[-2:], strict=False))
        if len(pairs) == 2 and all(n % 128 == 0 and count > 1 for n, count in pairs):
            return [-(-n // count) for n, count in pairs]
    return found
