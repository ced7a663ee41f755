"""Products of two small matrices, as LoRA trains them: put into a weight, or found in a change.

AddLowRank(scaling=2.0)
"""

from dataclasses import dataclass

from weight_convert.operations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLowRank(Operation):
    """A weight plus scaling x B A; the inputs are the weight, A and B, and of DoRA a magnitude.

    Attributes:
        scaling: of the product.
        num_experts: of a fused weight [experts, rows, columns], whose A [experts x rank, in] has
            the expert slowest and whose B [out, rank x experts] has it fastest; 0 of a matrix.
        is_transposed: whether the weight's rows are the inputs, as in GPT-OSS and embeddings.
    """

    scaling: float
    num_experts: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Factorise(Operation):
    """Both factors of what two weights differ in, A and then B, flat; the inputs are old and new.

    Attributes:
        rank: of the product, the nearest one in least squares.
        num_experts, is_transposed: as of `AddLowRank`, whose order of experts the factors have.
    """

    rank: int
    num_experts: int = 0
    is_transposed: bool = False
