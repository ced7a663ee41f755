"""Dtypes, memory and bytes of tensors.

May import: no room.
"""

from unified_ckpt.geometry.tensors.collector import collector_paused as collector_paused
from unified_ckpt.geometry.tensors.dtypes import StoredDtype as StoredDtype
from unified_ckpt.geometry.tensors.dtypes import dtype_of as dtype_of
from unified_ckpt.geometry.tensors.dtypes import header_shape as header_shape
from unified_ckpt.geometry.tensors.dtypes import stored_dtype as stored_dtype
from unified_ckpt.geometry.tensors.dtypes import torch_shape as torch_shape
from unified_ckpt.geometry.tensors.memory import bits_of as bits_of
from unified_ckpt.geometry.tensors.memory import byte_view as byte_view
from unified_ckpt.geometry.tensors.memory import contiguous_on_cpu as contiguous_on_cpu
from unified_ckpt.geometry.tensors.memory import is_plain_memory as is_plain_memory
from unified_ckpt.geometry.tensors.memory import is_wrapper as is_wrapper
from unified_ckpt.geometry.tensors.memory import narrow_box as narrow_box
