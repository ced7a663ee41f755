"""The policy of core/ as compiled code, for speed and for callers that may not wait for Python.

May import: core, sources, plan.
"""

from gpu_alloc.native.allocator import NativeAllocator as NativeAllocator
from gpu_alloc.native.allocator import Totals as Totals
from gpu_alloc.native.binding import Library as Library
from gpu_alloc.native.binding import is_compiled as is_compiled
from gpu_alloc.native.binding import native_library as native_library
from gpu_alloc.native.build import NativeUnavailableError as NativeUnavailableError
from gpu_alloc.native.build import build_library as build_library
from gpu_alloc.native.serving import Arena as Arena
