"""The way of rows through one dispatch: how often, and through which files, they are handed on.

Two gloo ranks; the second dispatch of a group, with gradients, on its default route. A function of
the package is handed rows if they are in an argument: as a tensor, memoryview or bytes that hold
one of the rows that were given to `dispatch` on any rank, or inside of lists, tuples, dicts,
dataclasses and closures that are arguments. A file is entered when a function of another file, or
none of ours, hands rows to one of its functions.

    python benchmarks/comm_collectives_way.py [--show]
"""

import argparse
import ctypes
import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import run_ranks

RANKS, TOKENS, HIDDEN, EXPERTS, CHOICES = 2, 6, 32, 4, 2
_SOURCE = str(Path(cc.__file__).parent)


def memory_in(value: Any) -> memoryview:
    """The memory of what is some, without a copy, which could turn up in memory of others later."""
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).cast("B")
    if isinstance(value, torch.Tensor) and value.numel() and value.dtype != torch.bool:
        flat = value.detach()
        if not flat.is_contiguous():  # look at all between its first and last element
            flat = flat.as_strided((max(1, (flat.shape[0] - 1) * flat.stride(0)),), (1,))
        address, size = flat.data_ptr(), flat.numel() * flat.element_size()
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return memoryview(b"")


def inside(value: Any) -> list[Any]:
    """What is handed over with a container, dataclass or closure."""
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # not filled yet
            return []
    return []


class Way:
    """Watches the calls of one thread; `steps` are the functions that were handed rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        rows_as_bytes = [bytes(memory_in(row)) for row in rows]
        self._any_row = re.compile(b"|".join(re.escape(row) for row in rows_as_bytes))
        self._frames: set[FrameType] = set()
        self.steps: list[tuple[str, str, bool]] = []  # file, function, whether it enters the file

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """See `sys.setprofile`."""
        code = frame.f_code
        is_ours = code.co_filename.startswith(_SOURCE)
        if event != "call" or not is_ours or frame in self._frames:
            return
        if code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            return
        self._frames.add(frame)  # a generator is called again and again
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)
        names = (*code.co_varnames[:count], *code.co_freevars)
        given = [frame.f_locals[name] for name in names if name in frame.f_locals]
        if self._holds_rows(given):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(_SOURCE):
                caller = caller.f_back
            enters = caller is None or caller.f_code.co_filename != code.co_filename
            name = code.co_filename[len(_SOURCE) + 1 :]
            self.steps.append((name, code.co_qualname, enters))

    def _holds_rows(self, values: list[Any]) -> bool:
        seen: set[int] = set()
        while values:
            value = values.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if self._any_row.search(memory_in(value)):
                return True
            values.extend(inside(value))
        return False


def rank_main(rank: int, world_size: int) -> list[tuple[str, str, bool]]:
    """Dispatch twice, and watch the second."""
    for turn in range(2):
        xs = [
            torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 * turn + r))
            for r in range(world_size)
        ]
        way = Way(torch.cat(xs))
        x = xs[rank].clone().requires_grad_()
        weights = torch.rand(TOKENS, CHOICES, requires_grad=True)
        idx = torch.rand(TOKENS, EXPERTS).topk(CHOICES, dim=1).indices
        dist.barrier()
        sys.setprofile(way if turn else None)
        sent = cc.dispatch(x, idx, weights, num_experts=EXPERTS, group=dist.group.WORLD)
        sys.setprofile(None)
        cc.combine(sent.x, sent.handle).sum().backward()
        got = torch.cat([sent.x.detach(), torch.zeros(1, HIDDEN)])
        if not way._holds_rows([got]):
            raise RuntimeError("the rows that came are none of those that were sent")
    return way.steps


def main() -> None:
    """Print the figures, and with --show the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the way itself")
    show = parser.parse_args().show
    ways: Any = run_ranks(rank_main, RANKS, timeout_s=120)
    if show:
        for file, function, enters in max(ways, key=len):
            print(f"{'-> ' if enters else '   '}{file:40} {function}")
    entries = [Counter(file for file, _, enters in way if enters) for way in ways]
    figures = {
        "dispatch_hand_overs": (max(map(len, ways)), "hand-overs"),
        "dispatch_files": (max(len({step[0] for step in way}) for way in ways), "files"),
        "dispatch_entries_of_one_file": (max(max(e.values()) for e in entries), "entries"),
    }
    for figure, (value, unit) in figures.items():
        print(json.dumps({"figure": figure, "value": value, "unit": unit, "n": 1}))


if __name__ == "__main__":
    main()
