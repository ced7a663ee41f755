"""Adam's moments in one byte an element: a quarter of fp32, on disk and in every copy of a state.

Each 64 elements of a box share one fp32 scale, so the error of an element is bounded by the largest
of its 64: 1/254 of it for the first moment, 1/255 in the square root for the second, which never
becomes zero where it was not. Codes stand under the tensor's own key and scales beside them, by
box; any layout reads both.

May import: geometry.
"""

from unified_ckpt.state.compression.moments import BLOCK as BLOCK
from unified_ckpt.state.compression.moments import compress_moments as compress_moments
from unified_ckpt.state.compression.moments import dequantize as dequantize
from unified_ckpt.state.compression.moments import moment_of as moment_of
from unified_ckpt.state.compression.moments import parse_scale_key as parse_scale_key
