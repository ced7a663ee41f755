"""Sizes and waits that several rooms share.

round_up(100, CACHE_LINE_BYTES)  # 128
"""

WORD_BYTES = 8
CACHE_LINE_BYTES = 64
TENSOR_BYTES = 16  # where a tensor of any dtype may begin
POLL_S = 0.05  # how often a waiting rank looks around


def round_up(count: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `count`."""
    return -(-count // alignment) * alignment
