"""The command `gpu-alloc run`: run a script whose CuPy arrays and CUDA tensors lie in our pools.

    gpu-alloc run --settings tuned.toml train.py --steps 3

No line of the script changes. Tensors are served in place of torch's allocator, or with
`--segments` by torch's own over our memory; CuPy's arrays are then in the same arena, else in a
pool of their own.

Invariant: the script ends as it would alone; what was served, or that nothing was, is said on the
error stream, and so is our report of the request that failed last.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from gpu_alloc.cli.options import Commands, effective_config, parse_size
from gpu_alloc.cli.program import add_program, check_installed, libraries_of, run_program
from gpu_alloc.core import AllocatorConfig, check_snapshot, format_bytes
from gpu_alloc.errors import AllocError, AllocValueError

_Lines = Callable[[], Iterator[str]]


def add_run(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("run", help="run a script on our pools")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--settings", help="the file that `gpu-alloc tune -o` wrote")
    given.add_argument("--conf", default="", metavar="KEY:VALUE,...", help="settings")
    parser.add_argument(
        "--segments",
        action="store_true",
        help="leave torch's caching allocator in place, over our memory; main thread only",
    )
    parser.add_argument(
        "--on-host",
        type=parse_size,
        metavar="SIZE",
        help="CuPy's arrays in so much host memory, without a device; no kernel runs",
    )
    add_program(parser)
    parser.set_defaults(run=_run_run)


def _run_run(arguments: argparse.Namespace) -> int:
    if arguments.on_host is not None and not arguments.of:
        arguments.of = ["cupy"]
    libraries = libraries_of(arguments)
    if arguments.on_host is not None and "torch" in libraries:
        raise AllocValueError("--on-host is for CuPy's arrays; leave out --of torch")
    if arguments.segments and "torch" not in libraries:
        raise AllocValueError("--segments is for torch; leave out --of cupy, or --segments")
    settings = arguments.settings
    config = AllocatorConfig.from_toml(settings) if settings else effective_config(arguments)
    check_installed(libraries)
    with ExitStack() as stack:
        lines: list[_Lines] = []
        if "torch" in libraries:
            lines.append(stack.enter_context(_torch(config, segments=arguments.segments)))
        if "cupy" in libraries:
            share = "arena" if "torch" in libraries else None
            lines.append(stack.enter_context(_cupy(config, share, arguments.on_host)))
        try:
            run_program(arguments.script, arguments.args)
        finally:
            said = [line for of_library in lines for line in of_library()]
            for line in said or ["the script allocated nothing that is served here"]:
                print(f"gpu-alloc: {line}", file=sys.stderr)
    return 0


@contextmanager
def _torch(config: AllocatorConfig, *, segments: bool) -> Iterator[_Lines]:
    torch, arena = import_module("torch"), None
    with ExitStack() as stack:
        if segments:
            pool = import_module("gpu_alloc.torch").segments(config)
            stack.enter_context(torch.cuda.use_mem_pool(pool))
        else:
            arena = import_module("gpu_alloc.torch").replace(config)
        yield lambda: _of_torch(torch, arena)


def _of_torch(torch: Any, arena: Any) -> Iterator[str]:
    """What torch says of its devices, or what we say under its names of what serves them."""
    memory_stats = import_module("gpu_alloc.torch").memory_stats
    if not torch.cuda.is_initialized():
        return
    devices = range(torch.cuda.device_count()) if arena is None else arena.devices()
    for device in devices:
        stats = torch.cuda.memory_stats(device) if arena is None else memory_stats(arena, device)
        peak, reserved = (stats.get(f"{of}_bytes.all.peak", 0) for of in ("allocated", "reserved"))
        if reserved:
            yield _line(f"torch, device {device}", peak, reserved)
        if arena is None:
            continue
        yield from _broken(f"torch, device {device}", arena.allocator(device))
        report = arena.allocator(device).last_report()
        if report is not None:
            yield f"torch, device {device}: the last request that failed: {report.message()}"


@contextmanager
def _cupy(config: AllocatorConfig, share: str | None, on_host: int | None) -> Iterator[_Lines]:
    host = import_module("gpu_alloc.cupy").HostBackend
    backend = None if on_host is None else host(on_host or None)
    try:
        pool = import_module("gpu_alloc.cupy").use(config, backend=backend, share=share)
    except RuntimeError as error:  # of CUDA's, by way of CuPy
        raise AllocError(
            f"CuPy cannot be served: {error}; give --of torch, or --on-host SIZE to run without a "
            "device"
        ) from error
    try:
        yield lambda: _of_cupy(pool, share)
    finally:
        import_module("gpu_alloc.cupy").uninstall()


def _of_cupy(pool: Any, share: str | None) -> Iterator[str]:
    for device, stats in pool.stats_of_devices().items():
        beside = " with torch's" if share else ""
        if stats.reserved_peak_bytes:
            name = f"CuPy, device {device}{beside}"
            yield _line(name, stats.allocated_peak_bytes, stats.reserved_peak_bytes)
            yield from _broken(name, pool.allocator(device))


def _broken(of: str, allocator: Any) -> Iterator[str]:
    """What is wrong with our account of the memory, which a script with wild pointers can break."""
    for problem in check_snapshot(allocator.snapshot()):
        yield f"{of}: the allocator's account of its memory is broken: {problem}"


def _line(of: str, peak: int, reserved: int) -> str:
    return f"{of}: at most {format_bytes(peak)} live and {format_bytes(reserved)} reserved"
