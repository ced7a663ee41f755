"""Weights in blocks of fp8 or mxfp4, and in plain numbers: `quantize` and `dequantize`.

A room of its own, since only here tensors come and go with their scales.

May import: run, plan, outputs, operations, specs, files, staging.
"""

from weight_convert.quantization.dequantizing import dequantize as dequantize
from weight_convert.quantization.quantizing import quantize as quantize
