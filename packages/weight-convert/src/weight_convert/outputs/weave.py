"""Rows put together from ranges of other tensors: what cuts along inner dims, and joins them again.

    Weave(num_rows=8, runs=(Weave.Run(input=0, offset_bytes=4, stride_bytes=16, size_bytes=8),))

is bytes 4 to 12 of each of eight rows of 16 bytes. Bytes are moved, never computed with.
"""

from dataclasses import dataclass

from weight_convert.operations import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Weave(Operation):
    """`num_rows` rows, each made of `runs` in order; behind the last one, `zero_bytes` zeros.

    Before all of them stand the bytes `begins_with`, such as those between the tensors of a file.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Run:
        """Of row i: `size_bytes` from `offset_bytes + i * stride_bytes` of one input."""

        input: int
        offset_bytes: int
        stride_bytes: int
        size_bytes: int

    num_rows: int
    runs: tuple[Run, ...]
    zero_bytes: int = 0
    begins_with: bytes = b""
