"""A stub of the CUDA runtime, on which torch's own caching allocator runs without a GPU.

done = run_on_stub("script.py", gpu_bytes=1 << 30, env={"PYTORCH_CUDA_ALLOC_CONF": "..."})

Kernels do nothing and memory has nothing behind it: for allocators, streams and statistics only.
"""

from devicetest.cuda_stub.running import StubUnavailableError as StubUnavailableError
from devicetest.cuda_stub.running import run_on_stub as run_on_stub
from devicetest.cuda_stub.running import stub_environment as stub_environment
