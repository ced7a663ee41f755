"""Deliberate mistakes as a table: name, the call of the others, of the odd rank, what must be said.

MISUSE_OF["op differs"].run(At(rank=1, size=2))      # a MismatchError on every rank
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from comm_collectives.checking.misuse.outcome import (
    MISMATCH,
    PEER_FAILED,
    REFUSAL,
    TIMEOUT,
    TYPE_REFUSAL,
    At,
    Misuse,
    everybody,
    the_others,
)
from comm_collectives.checking.misuse.programs import PROGRAMS
from comm_collectives.checking.misuse.steps import ASYNC, RAW_CALLS, SITE, Step, rows, run_steps
from comm_collectives.moe import MoeOptions

_LIMIT_S = 0.3
_ENQUIRY_S = 4.0  # after a limit has passed, for asking who was there
_FLOAT8, _DEDUP = MoeOptions(payload="float8_e4m3"), MoeOptions(route="dedup")
Arguments = dict[str, Any]
Change = Callable[[torch.Tensor], Any]
_GATHER = "torch all_gather_into_tensor"
_Row = tuple[str, str, Mapping[str, Any], str]


def _x(change: Change, name: str = "x") -> Arguments:
    """The usual tensor, changed."""
    return {name: lambda at: change(at.x)}


def _each(name: str, number: float) -> Arguments:
    """A list with this number for each rank."""
    return {name: lambda at: [number] * at.size}


def _rows(output: int, given: int | None = None, change: Change = torch.Tensor.float) -> Arguments:
    """Output (and input) of an all_gather_into_tensor, of rows for one rank (1) or for all (0)."""
    made: Arguments = {"output_tensor": lambda at: change(rows(output or at.size))}
    return made if given is None else {**made, "input_tensor": lambda at: rows(given or at.size)}


def _sends(*given: Any) -> Arguments:
    """A list to scatter, the usual tensors but for the last."""
    return {"tensors": lambda at: [at.x] * (at.size - 1) + [g(at) for g in given]}


_EXPANDED = _x(lambda x: x[:1].expand(x.shape), "tensor")
_SCATTER = "torch reduce_scatter_tensor"
_SWAPPED = {"output": lambda at: rows(at.size), "input": lambda at: rows()}
_THRICE = {"num_experts": lambda at: 3 * at.size}
_INT32 = torch.zeros(4, 1, dtype=torch.int32)
_LAST_GETS = {"splits": lambda at: at.splits[::-1]}
# The same call on every rank, the odd one with other arguments; the text names the odd rank. After
# a bar stands another call, which the odd rank makes instead.
_MISMATCHES: tuple[_Row, ...] = (
    ("dtype differs, same bytes", "all_reduce", _x(torch.Tensor.int), "dtype; float32; int32"),
    ("dtype differs, other bytes", "all_reduce", _x(torch.Tensor.half), "dtype; float32; float16"),
    ("dtype differs in all_to_all", "all_to_all", _x(torch.Tensor.int), "dtype"),
    ("dtype differs in all_gather", "all_gather", _x(torch.Tensor.int), "dtype"),
    ("dtype differs in gather", "gather", _x(torch.Tensor.int), "dtype"),
    ("op differs", "all_reduce", {"op": "max"}, "op; op=max; op=sum"),
    ("op differs in reduce_scatter", "reduce_scatter", {"op": "max"}, "op; op=max; op=sum"),
    ("lengths differ", "all_reduce", _x(lambda x: x[1:]), "shape; (2999,); (3000,)"),
    ("shapes differ, same length", "all_reduce", _x(lambda x: x.view(2, -1)), "shape; (2, 1500)"),
    ("row shapes differ in all_gather", "all_gather", _x(lambda x: x.view(-1, 2)), "row shape"),
    ("row shapes differ in all_to_all", "all_to_all", _x(lambda x: x.view(-1, 1)), "row shape"),
    ("splits differ in reduce_scatter", "reduce_scatter", _LAST_GETS, "splits"),
    ("all_reduce and all_to_all", "all_reduce | all_to_all", {}, "operation; all_reduce(; all_to_"),
    ("broadcast and all_to_all", "broadcast | all_to_all", {}, "operation; broadcast(; all_to_"),
    ("all_reduce and broadcast_nested", "all_reduce | broadcast_nested", {}, "operation; nested("),
    ("gather and scatter", "gather | scatter", {}, "operation; gather(; scatter("),
    ("source differs in broadcast", "broadcast", {"src": lambda at: at.rank}, "src; src=0"),
    ("source differs in a nested one", "broadcast_nested", {"src": lambda at: at.rank}, "src=0"),
    ("destination differs in gather", "gather", {"dst": lambda at: at.rank}, "dst; dst=0"),
    ("source differs in scatter", "scatter", {"src": lambda at: at.rank}, "src; src=0"),
    ("output_splits on one rank only", "all_to_all", _each("output_splits", 0), "_splits given"),
    ("torch order: op differs", "torch all_reduce", {"op": "max"}, "op=max; op=sum"),
    ("torch order: lengths differ", "torch all_reduce", _x(lambda x: x[1:], "tensor"), "(2999,)"),
    ("torch order: source differs", "torch broadcast", {"src": lambda at: at.rank}, "src"),
    ("torch order: other operation", "torch all_reduce | torch broadcast", {}, "operation"),
    ("dispatch: num_experts differs", "dispatch", _THRICE, "experts="),
    ("dispatch: hidden size differs", "dispatch", {"hidden": 16}, "hidden size; =16"),
    ("dispatch: dtype differs", "dispatch", {"dtype": torch.bfloat16}, "dtype; bfloat16; float32"),
    ("dispatch: other dtype of weights", "dispatch", {"weight_dtype": torch.float64}, "float64"),
    ("dispatch: route differs", "dispatch", {"options": _DEDUP}, "route; dedup; flat"),
    ("dispatch: payload differs", "dispatch", {"options": _FLOAT8}, "payload; float8_e4m3; full"),
    ("combine: hidden size differs", "combine", {"hidden": 16}, "hidden size; =16"),
    ("combine: dtype differs", "combine", {"dtype": torch.float64}, "dtype; float64"),
)
# As above; whoever compares names the odd rank in the middle of the text, and one line.
_DATA_MISMATCHES: tuple[_Row, ...] = (
    ("receiver of a broadcast is longer", "broadcast", _x(lambda x: x[:2000]), "2000; 3000"),
    ("receiver has another dtype", "broadcast", _x(torch.Tensor.int), "float32; int32"),
)
_REFUSALS: tuple[_Row, ...] = (
    ("op unknown on one rank", "all_reduce", {"op": "mean"}, "op='mean'"),
    ("no dims on one rank", "all_to_all", _x(lambda x: x[0]), "x has no dims"),
    ("no dims on one rank in all_gather", "all_gather", _x(lambda x: x[0]), "x has no dims"),
    ("splits do not add up", "all_to_all", _each("input_splits", 1), "input_splits"),
    ("splits of parts do not add up", "reduce_scatter", _each("splits", 1), "splits"),
    ("splits negative", "all_to_all", _each("input_splits", -1), "input_splits"),
    ("source outside the group on one rank", "broadcast", {"src": lambda at: at.size}, "src="),
    ("destination outside the group on one rank", "gather", {"dst": -1}, "dst=-1"),
    ("limit of no seconds on one rank", "all_reduce", {"timeout_s": -1.0}, "timeout_s=-1"),
    ("torch order: output too short", _GATHER, _rows(0, None, lambda x: x[1:]), "output has shape"),
    ("torch order: one rank swaps input and output", _GATHER, _rows(1, 0), "the other way round"),
    ("torch order: elements share memory", "torch all_reduce", _EXPANDED, "share mem"),
    ("torch order: source outside", "torch broadcast", {"src": lambda at: at.size}, "src="),
    ("dispatch: expert out of range", "dispatch", {"choice": 1000}, "topk_idx holds"),
    ("dispatch: expert negative", "dispatch", {"choice": -2}, "topk_idx holds -2"),
    ("dispatch: fewer weights", "dispatch", {"topk_weights": torch.ones(3, 1)}, "weights has sha"),
    ("dispatch: tokens without dims", "dispatch", {"x": torch.ones(4)}, "x has shape (4,)"),
    ("dispatch: alignment 0", "dispatch", {"expert_alignment": 0}, "expert_alignment=0"),
    ("dispatch: num_experts not divisible", "dispatch", {"num_experts": 3 * 5 * 7 + 4}, "experts="),
    ("combine: a row too many", "combine", {"more": 1}, "y has shape"),
)
_TYPE_REFUSALS: tuple[_Row, ...] = (
    ("no tensor on one rank", "all_reduce", {"x": [1.0]}, "list"),
    ("sparse tensor on one rank", "all_gather", _x(torch.Tensor.to_sparse), "sparse"),
    ("tensor without data on one rank", "all_reduce", _x(lambda x: x.to("meta")), "meta"),
    ("sum of bool on one rank", "all_reduce", _x(torch.Tensor.bool), "torch.bool"),
    ("splits no integers", "all_to_all", _each("input_splits", 0.5), "input_splits"),
    ("torch order: output of another dtype", _GATHER, _rows(0, None, torch.Tensor.int), "int32"),
    ("torch order: no tensor on one rank", "torch broadcast", {"tensor": [1.0]}, "list"),
    ("dispatch: choices of another dtype", "dispatch", {"topk_idx": _INT32}, "idx is torch.int32"),
    ("combine: rows of integers", "combine", {"dtype": torch.int32}, "y is torch.int32"),
)
# Every rank makes the same mistake, or the root does.
_ALIKE: tuple[tuple[str, str, Mapping[str, Any], str, str], ...] = (
    ("source gives None", "broadcast", {"x": None}, "NoneType; rank 0: ", TYPE_REFUSAL),
    ("too few tensors to scatter", "scatter", _sends(), "tensors; rank 0: ", REFUSAL),
    ("something else to scatter", "scatter", _sends(lambda at: None), "NoneType", TYPE_REFUSAL),
    ("two dtypes to scatter", "scatter", _sends(lambda at: at.x.int()), "kinds; rank 0: ", REFUSAL),
    ("no value to broadcast", "broadcast_nested", {"obj": [object]}, "obj[0] is a", TYPE_REFUSAL),
    ("sum of fp8", "all_reduce", _x(lambda x: x.to(torch.float8_e4m3fn)), "float8", TYPE_REFUSAL),
    ("torch order: all ranks swap input and output", _SCATTER, _SWAPPED, "way round", REFUSAL),
)
_ONCE: Step = ("all_reduce", {})
_BIAS, _SCALE = ("all_reduce", {SITE: "bias"}), ("all_reduce", {SITE: "scale"})
_LATER = ("all_reduce", {ASYNC: True}), ("all_gather", {ASYNC: True})
_TO_FIRST: Step = (
    "all_to_all",
    {"output_splits": lambda at: [3000 if at.rank == 0 else 0] * at.size},
)
_ONE_MORE: Step = ("all_to_all", {"output_splits": lambda at: [1] + [0] * (at.size - 1)})
_SITES = "call site; at scale; at bias"
# What the others do in turn, and what the odd rank does; then how many lines the text names.
_ORDERS: tuple[tuple[str, tuple[Step, ...], tuple[Step, ...], str, int], ...] = (
    ("same shape, other order", (_BIAS, _SCALE), (_SCALE, _BIAS), _SITES, 0),
    ("one rank skips a call", (_BIAS, _SCALE), (_SCALE,), _SITES, 0),
    ("asynchronous calls in another order", _LATER, _LATER[::-1], "all_reduce(; all_gather(", 2),
    ("splits disagree", (_TO_FIRST,), (_ONE_MORE,), "input_splits; output_splits", 1),
)
# Arguments that torch's functions do not have.
_OURS_ALONE = (
    "op unknown on one rank",
    "limit of no seconds on one rank",
    "output_splits on one rank only",
)
_ABSENT = ("all_reduce", "all_to_all", "gather", "broadcast", "recv_tensors")


def _misuse(name: str, usual: Sequence[Step], odd: Sequence[Step], like: Misuse) -> Misuse:
    def run(at: At) -> None:
        run_steps(odd if at.odd else usual, at)

    def run_raw(at: At) -> None:
        run_steps(odd if at.odd else usual, at, raw=True)

    can_be_raw = name not in _OURS_ALONE and all(c in RAW_CALLS for c, _ in (*usual, *odd))
    return replace(like, name=name, run=run, run_raw=run_raw if can_be_raw else None)


def _like(error: str, says: str, sides: int | None = None) -> Misuse:
    """A mistake that has to end so, whatever it is."""
    return Misuse(name="", run=everybody, error=error, says=tuple(says.split("; ")), sides=sides)


def _of_rows(table: Sequence[_Row], error: str, sides: int | None = None) -> Iterator[Misuse]:
    for name, calls, changes, says in table:
        usual, _, other = calls.partition(" | ")
        like = _like(error, says + "; {odd}" + ("" if sides else ": "), sides)
        yield _misuse(name, [(usual, {})], [(other or usual, changes)], like)


def _all() -> Iterator[Misuse]:
    yield from _of_rows(_MISMATCHES, MISMATCH)
    yield from _of_rows(_DATA_MISMATCHES, MISMATCH, sides=1)
    yield from _of_rows(_REFUSALS, REFUSAL)
    yield from _of_rows(_TYPE_REFUSALS, TYPE_REFUSAL)
    for name, call, given, says, error in _ALIKE:
        yield _misuse(name, [(call, given)], [(call, given)], _like(error, says))
    for name, first, second, says, sides in _ORDERS:
        yield _misuse(name, first, second, _like(MISMATCH, says + "; {odd}", sides))
    yield from PROGRAMS
    for call in _ABSENT:
        says = "{odd}" if call == "recv_tensors" else "did not arrive: {odd}"
        steps = [(call, {"timeout_s": _LIMIT_S})]
        yield _misuse(f"one rank never comes to {call}", steps, [], _late(TIMEOUT, says))
    like = replace(_late(PEER_FAILED, "{odd}"), dies=True)
    yield _misuse("one rank dies", [_ONCE, _ONCE], [_ONCE, ("die", {})], like)


def _late(error: str, says: str) -> Misuse:
    """A mistake of which the others hear when a limit has passed, and whose group is of no use."""
    like = _like(error, says)
    return replace(like, raised_by=the_others, goes_on=False, within_s=_ENQUIRY_S)


MISUSES = tuple(_all())
MISUSE_OF = {misuse.name: misuse for misuse in MISUSES}
RAW = tuple(misuse.name for misuse in MISUSES if misuse.run_raw is not None)
