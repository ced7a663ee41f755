"""Names, shapes and operations of the quantisations that stand in checkpoints of MoE models.

    method = method_of(catalog.config["quantization_config"])
    method.scale_of("model.layers.0.mlp.experts.0.up_proj.weight")

| method | codes | scales | weight |
|---|---|---|---|
| fp8 (DeepSeek, MiniMax) | `X`, F8_E4M3 | `X_scale_inv`, one a block | `X` |
| mxfp4 (GPT-OSS) | `X_blocks`, U8, two a byte | `X_scales`, U8, one for 32 | `X`, transposed |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weight_convert._checks import is_block
from weight_convert.errors import WeightConvertError
from weight_convert.operations import FromBlocks, FromMx, Operation, ToBlocks, ToMx

_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One quantisation; `block` is rows x columns of fp8, and (1, 32) of mxfp4."""

    name: str
    block: tuple[int, int]
    codes_suffix: str
    scales_suffix: str
    codes_dtype: str

    def weight_of(self, codes_key: str) -> str:
        """Name of the weight whose codes these are."""
        return codes_key.removesuffix(self.codes_suffix)

    def scale_of(self, codes_key: str) -> str:
        """Name of the scales beside codes."""
        return self.weight_of(codes_key) + self.scales_suffix

    def are_codes(self, key: str, dtype: str) -> bool:
        """Whether a stored tensor holds codes."""
        return dtype == self.codes_dtype and key.endswith(self.codes_suffix)

    def are_scales(self, key: str) -> bool:
        """Whether a stored tensor holds scales, by its name."""
        return key.endswith(self.scales_suffix)

    def weight_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight that codes of this shape are."""
        if self.name == "fp8":
            return codes
        *outer, rows, groups, _ = codes
        return (*outer, groups * _GROUP, rows)

    def codes_shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a weight."""
        if self.name == "fp8":
            return weight
        *outer, columns, rows = weight
        return (*outer, rows, columns // _GROUP, _GROUP // 2)

    def scales_shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight."""
        if self.name == "fp8":
            *outer, rows, columns = weight
            return (*outer, -(-rows // self.block[0]), -(-columns // self.block[1]))
        return self.codes_shape(weight)[:-1]

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Why a weight of this shape cannot be encoded, or ""."""
        if len(shape) < 2:
            return "it is no matrix"
        if self.name == "mxfp4" and shape[-2] % _GROUP:
            return f"its {shape[-2]} columns are no multiple of {_GROUP}"
        return ""

    def decode(self) -> Operation:
        """Codes and scales to weights."""
        return FromBlocks(block=self.block) if self.name == "fp8" else FromMx()

    def encode(self, part: Literal["codes", "scales"]) -> Operation:
        """A weight to its codes or scales."""
        return ToBlocks(block=self.block, part=part) if self.name == "fp8" else ToMx(part=part)

    def scales_dtype(self) -> str:
        """The dtype of scales that are made here."""
        return "F32" if self.name == "fp8" else "U8"


def fp8(block: tuple[int, int]) -> Method:
    """Blocks of fp8."""
    return Method(
        name="fp8",
        block=block,
        codes_suffix="",
        scales_suffix="_scale_inv",
        codes_dtype="F8_E4M3",
    )


def mxfp4() -> Method:
    """GPT-OSS's mxfp4."""
    return Method(
        name="mxfp4",
        block=(1, _GROUP),
        codes_suffix="_blocks",
        scales_suffix="_scales",
        codes_dtype="U8",
    )


def method_of(entry: object, where: object) -> Method:
    """The method of a `quantization_config`.

    Raises:
        WeightConvertError: there is none, or it is of another kind.
    """
    if not isinstance(entry, Mapping):
        raise WeightConvertError(
            f"{where} has no quantization_config; it says how scales belong to weights"
        )
    name, block = entry.get("quant_method"), entry.get("weight_block_size")
    if name == "mxfp4":
        return mxfp4()
    if name == "fp8" and is_block(block):
        return fp8((block[0], block[1]))
    raise WeightConvertError(
        f"{where}: quantization_config of quant_method {name!r} with weight_block_size {block!r}; "
        f"known are 'fp8' in blocks such as [128, 128], and 'mxfp4'"
    )
