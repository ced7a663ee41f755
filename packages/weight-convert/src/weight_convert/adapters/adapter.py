"""An adapter as peft writes it: `adapter_config.json` and `adapter_model.safetensors`.

    adapter = read_adapter("my-lora")
    adapter.factors["model.layers.0.self_attn.q_proj"].scaling

Invariant: every tensor of the file is a part of some factors or a whole replacement, or an error.
"""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_convert._checks import checked_path
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files import SourceTensor, read_header

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)(\.weight)?"
)
_NAMED = r"(.*\.)?({})$"  # as peft takes a pattern of names
# What changes the meaning of the factors, with the value that leaves it as it is.
_PLAIN: Mapping[str, Any] = {
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "use_bdlora": None,
    "velora_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "arrow_config": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "trainable_token_indices": None,
}
# These take the first factors out of the model's weights when an adapter begins (LoRA-GA, by its
# gradients), so that the factors add to what is left, which is nowhere stored.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The parts of one module's update.

    Attributes:
        a, b: the factors; of an embedding, whose weight is transposed, too.
        magnitude: of DoRA.
        alpha: the numerator of the scaling.
        alpha_pattern: other numerators by pattern of names, the first that matches.
        uses_root: whether it is divided by the root of the rank (rsLoRA).
        is_embedding: whether the module is an embedding.
    """

    a: SourceTensor
    b: SourceTensor
    magnitude: SourceTensor | None
    alpha: float
    alpha_pattern: Mapping[str, float]
    uses_root: bool
    is_embedding: bool

    def scaling(self, rank: int, name: str) -> float:
        """The factor of the product; `name` is the module's, or of fused experts their own."""
        matching = (
            value
            for pattern, value in self.alpha_pattern.items()
            if re.match(_NAMED.format(pattern), name)
        )
        return next(matching, self.alpha) / (math.sqrt(rank) if self.uses_root else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What an adapter holds.

    Attributes:
        path: its weight file.
        factors: by the module's name in the model; `.base_layer` is another parameter of it.
        replaced: whole tensors of `modules_to_save`, by name; and of embeddings that have factors,
            which peft stores with them.
        parameters: ends of the names of parameters that have factors by themselves, such as those
            of fused experts.
        keeps_tied: whether a head that is tied to the embedding was trained with it, as one.
    """

    path: Path
    factors: Mapping[str, Factors]
    replaced: Mapping[str, SourceTensor]
    parameters: tuple[str, ...] = ()
    keeps_tied: bool = False

    def is_parameter(self, key: str) -> bool:
        """Whether factors of this tensor go by its own name, not by that of its module."""
        return any(key == end or key.endswith(f".{end}") for end in self.parameters)


def read_adapter(directory: Path | str) -> Adapter:
    """Read an adapter's config and header.

    Raises:
        WeightConvertError: a variant of LoRA that is not known here, or parts that are missing.
        CorruptFileError: a damaged file.
        OSError: a file that is missing.
    """
    folder = checked_path(directory)
    config = _config(folder / CONFIG_NAME)
    path = folder / WEIGHTS_NAME
    parts: dict[str, dict[str, SourceTensor]] = defaultdict(dict)
    replaced: dict[str, SourceTensor] = {}
    for entry in read_header(path).tensors:
        tensor = SourceTensor(
            key=entry.key,
            dtype=entry.dtype,
            shape=entry.shape,
            file=0,
            offset_bytes=entry.offset_bytes,
            size_bytes=entry.size_bytes,
        )
        name = entry.key.removeprefix(PREFIX)
        match = _PART.fullmatch(name)
        if match is None:
            name = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
            replaced[name] = tensor
        else:
            parts[match["module"]][match["part"].replace("embedding_", "")] = tensor
            if "embedding" in match["part"]:
                parts[match["module"]]["embedding"] = tensor
    factors = {module: _factors(path, module, found, config) for module, found in parts.items()}
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise _mistaken(folder, "target_parameters", parameters, "a list of names")
    return Adapter(
        path=path,
        factors=factors,
        replaced=replaced,
        parameters=tuple(parameters),
        keeps_tied=bool(config.get("ensure_weight_tying")),
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightConvertError(
            f"{path.parent} has no {path.name}; give an adapter as peft's save_pretrained writes it"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptFileError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise WeightConvertError(f"{path} is not of peft_type LORA")
    for name, plain in _PLAIN.items():
        if config.get(name, plain) != plain:
            raise WeightConvertError(
                f"{path} has {name}={config[name]!r}, which cannot be merged here; merge it with "
                f"peft's merge_and_unload"
            )
    began = str(config.get("init_lora_weights")).lower()
    if began.startswith(_CHANGES_BASE):
        raise WeightConvertError(
            f"{path} has init_lora_weights={config['init_lora_weights']!r}, which changed the "
            f"model's weights when training began; merge it with peft's merge_and_unload, or save "
            f"it with path_initial_model_for_weight_conversion, which makes a plain adapter of it"
        )
    return config


def _factors(
    path: Path, module: str, found: Mapping[str, SourceTensor], config: Mapping[str, Any]
) -> Factors:
    if "lora_A" not in found or "lora_B" not in found:
        there = ", ".join(sorted(found))
        raise WeightConvertError(f"{path}: {module} has {there}; expected lora_A and lora_B")
    a, b = found["lora_A"], found["lora_B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise WeightConvertError(
            f"{path}: lora_A of {module} has shape {list(a.shape)} and lora_B {list(b.shape)}; "
            f"expected [rank, in] and [out, rank] of one rank; the file is damaged"
        )
    magnitude = found.get("lora_magnitude_vector")
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise WeightConvertError(
            f"{path}: use_dora is {config.get('use_dora')}, but the magnitude of {module} is "
            f"{'there' if magnitude else 'missing'}"
        )
    if magnitude is not None and "embedding" in found:
        raise WeightConvertError(
            f"{path}: {module} is an embedding with DoRA, which cannot be merged here; merge it "
            f"with peft's merge_and_unload"
        )
    if magnitude is not None and math.prod(magnitude.shape) != b.shape[0]:
        raise WeightConvertError(
            f"{path}: the magnitude of {module} has shape {list(magnitude.shape)}; expected "
            f"{b.shape[0]} numbers, one for each row of lora_B; the file is damaged"
        )
    return Factors(
        a=a,
        b=b,
        magnitude=magnitude,
        alpha=_number(path.parent, "lora_alpha", config.get("lora_alpha", 8)),
        alpha_pattern=_alpha_pattern(path.parent, config.get("alpha_pattern") or {}),
        uses_root=bool(config.get("use_rslora")),
        is_embedding="embedding" in found,
    )


def _alpha_pattern(folder: Path, table: object) -> Mapping[str, float]:
    if not isinstance(table, dict):
        raise _mistaken(folder, "alpha_pattern", table, "numbers by pattern")
    for pattern in table:
        try:
            re.compile(_NAMED.format(pattern))
        except (re.error, OverflowError) as error:
            raise _mistaken(folder, "alpha_pattern", pattern, "regular expressions") from error
    return {key: _number(folder, "alpha_pattern", value) for key, value in table.items()}


def _number(folder: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _mistaken(folder, name, value, "a finite number")
    return float(value)


def _mistaken(folder: Path, name: str, value: object, expected: str) -> WeightConvertError:
    return WeightConvertError(
        f"{folder / CONFIG_NAME} has {value!r} in {name}; expected {expected}, as peft writes it"
    )
