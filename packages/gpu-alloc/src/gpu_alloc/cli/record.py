"""The command `gpu-alloc record`: run a script with the recording hooks on, and keep its trace.

    gpu-alloc record -o trace.jsonl train.py --steps 3

CuPy's allocations are recorded by `TraceHook`, torch's by `TraceRecorder`, both in all threads;
which of the two libraries is hooked is said by `--of`, or is all that are installed. Each has
memory of its own and hence its trace.

Invariant: the script ends as it would alone, with its exit status or its traceback, and what was
recorded until then is written.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from gpu_alloc.cli.options import Commands
from gpu_alloc.cli.program import add_program, check_installed, libraries_of, run_program
from gpu_alloc.errors import AllocValueError
from gpu_alloc.events import TraceEvent
from gpu_alloc.trace import save_trace

_Traces = Callable[[], dict[str, list[TraceEvent]]]


def add_record(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("record", help="run a script and record what it allocates")
    parser.add_argument("-o", "--out", default="trace.jsonl", type=Path, help="the trace to write")
    add_program(parser)
    parser.set_defaults(run=_run_record)


def _run_record(arguments: argparse.Namespace) -> int:
    libraries = libraries_of(arguments)
    out = arguments.out.resolve()  # the script may change the folder
    if not out.parent.is_dir():
        raise AllocValueError(f"--out {arguments.out}: there is no folder {out.parent}; make it")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        what = "is a folder" if out.is_dir() else f"cannot be written: {out.parent} is read-only"
        raise AllocValueError(f"--out {arguments.out} {what}; name a file that can be written")
    check_installed(libraries)
    traces: list[_Traces] = []
    try:
        with ExitStack() as stack:
            for name in libraries:
                traces.append(stack.enter_context(_RECORDERS[name]()))
            run_program(arguments.script, arguments.args)
    finally:
        _write({k: v for found in traces for k, v in found().items()}, out)
    return 0


@contextmanager
def _of_cupy() -> Iterator[_Traces]:
    hook = import_module("gpu_alloc.cupy").TraceHook(all_threads=True)
    with hook:
        yield lambda: {f"cupy-{device}": events for device, events in hook.traces.items()}


@contextmanager
def _of_torch() -> Iterator[_Traces]:
    recorder = import_module("gpu_alloc.torch").TraceRecorder(all_threads=True)
    with recorder:
        yield lambda: {
            f"torch-{device.replace(':', '-')}": events
            for device, events in recorder.traces().items()
        }


_RECORDERS = {"cupy": _of_cupy, "torch": _of_torch}


def _write(traces: dict[str, list[TraceEvent]], out: Path) -> None:
    """One trace goes to `out`; several beside it, each under its name."""
    found = {name: events for name, events in traces.items() if events}
    for name, events in found.items():
        path = out if len(found) == 1 else out.with_name(f"{out.stem}.{name}{out.suffix}")
        print(f"gpu-alloc: {save_trace(events, path)} events of {name} -> {path}", file=sys.stderr)
    if not found:
        print("gpu-alloc: the script allocated nothing, so no trace was written", file=sys.stderr)
