"""What is drawn at random: rows of a new router.

DrawRows(seed=0, std=0.02, copies=2)
"""

from dataclasses import dataclass

from weight_convert.operations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows(Operation):
    """Normal numbers [rows, columns] without an input; each row stands `copies` times.

    Attributes:
        seed: of this tensor; the same one gives the same numbers, whatever the chunks.
        std: standard deviation.
        copies: how many neighbouring rows are equal.
    """

    seed: int
    std: float
    copies: int = 1
