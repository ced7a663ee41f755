"""Operations that keep or move values: casts and transposes.

Cast()     # one input, in the dtype of the result
"""

from dataclasses import dataclass

from weight_convert.operations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Operation):
    """One input, in the dtype of the result: rounded to nearest, ties to even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transpose(Operation):
    """One input with its last two dims exchanged, in the dtype of the result.

    Attributes:
        first_row, num_rows: which rows of the result; all of them where `num_rows` is -1.
    """

    first_row: int = 0
    num_rows: int = -1
