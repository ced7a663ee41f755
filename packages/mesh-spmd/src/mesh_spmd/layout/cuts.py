"""Where one tensor dim is cut, for all ranks at once: a list of bounds instead of a box per rank.

Several axes may cut the same dim; they nest, the first one outermost. The pieces then lie one after
the other in row-major order of these axes, so that piece i is elements bounds[i] to bounds[i + 1].

Invariant: bounds never descend, begin with 0 and end with the size of the dim.

    cut_bounds(6, ((4, None),))            # (0, 2, 4, 6, 6): as torch.chunk cuts
    cut_bounds(6, ((3, (1, 5, 0)),))       # (0, 1, 6, 6): ragged
    cut_bounds(6, ((2, None), (2, None)))  # (0, 2, 3, 5, 6): nested
"""

from functools import lru_cache
from itertools import accumulate, pairwise

from mesh_spmd.errors import MeshValueError

Cut = tuple[int, tuple[int, ...] | None]  # number of parts, and their sizes where they are given


@lru_cache(maxsize=4096)
def cut_bounds(size: int, cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Return the bounds of all pieces of a dim of `size` elements, cut by `cuts` one in the other.

    A part without given sizes is cut as torch.chunk cuts: ceil(n / p) each, until none are left.

    Raises:
        MeshValueError: given sizes do not add up to the piece that they cut.
    """
    bounds = [0, size]
    for num_parts, sizes in cuts:
        cut = [0]
        for low, high in pairwise(bounds):
            if sizes is None:
                part = -(-(high - low) // num_parts)
                cut += [min(low + part * i, high) for i in range(1, num_parts + 1)]
            elif sum(sizes) != high - low:
                raise MeshValueError(
                    f"sizes {sizes} add up to {sum(sizes)}, but cut a piece of {high - low} of a "
                    f"dim of {size}; give sizes that add up to it"
                )
            else:
                cut += list(accumulate(sizes, initial=low))[1:]
        bounds = cut
    return tuple(bounds)
