"""Adam's moments in one byte an element.

May import: geometry.
"""

from unified_ckpt.state.compression.moments import BLOCK as BLOCK
from unified_ckpt.state.compression.moments import compress_moments as compress_moments
from unified_ckpt.state.compression.moments import dequantize as dequantize
from unified_ckpt.state.compression.moments import moment_of as moment_of
from unified_ckpt.state.compression.moments import parse_scale_key as parse_scale_key
