"""Where chunks come from: invented addresses, real host memory, a GPU.

May import: no room.
"""

from gpu_alloc.sources.address import AddressSource as AddressSource
from gpu_alloc.sources.chunk_source import ChunkSource as ChunkSource
from gpu_alloc.sources.chunk_source import check_alignment as check_alignment
from gpu_alloc.sources.chunk_source import round_up as round_up
from gpu_alloc.sources.cuda import CudaEvents as CudaEvents
from gpu_alloc.sources.cuda import CudaSource as CudaSource
from gpu_alloc.sources.cuda import import_cupy as import_cupy
from gpu_alloc.sources.host import HostSource as HostSource
from gpu_alloc.sources.paged import PagedAddressSource as PagedAddressSource
from gpu_alloc.sources.paged import PagedHostSource as PagedHostSource
from gpu_alloc.sources.paged import PagedSource as PagedSource
from gpu_alloc.sources.stream_events import StreamEvents as StreamEvents
