"""The values of computed tensors, chunk by chunk in bounded memory.

A room of its own, since it alone imports torch; `run/` imports it only for plans that compute.

May import: outputs, operations, files, staging.
"""

from weight_convert.compute.chunks import tensor_chunks as tensor_chunks
from weight_convert.compute.reading import TensorReader as TensorReader
