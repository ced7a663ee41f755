"""Tensors inside nested values are found and exchanged; everything else stays the same object."""

from dataclasses import dataclass

import torch

from comm_collectives.call.handles.walk import replace_tensors, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    anchor: torch.Tensor
    note: object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outer:
    x: torch.Tensor
    counts: tuple[int, ...]
    inner: _Inner
    other: _Inner


def test_tensors_are_found_in_nested_values() -> None:
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_in({"a": [x, (y, None)], "b": 3, "c": _Inner(anchor=z, note=None)}))
    assert [t.numel() for t in found] == [1, 2, 3]


def test_tensors_are_exchanged_by_identity_and_the_rest_is_kept() -> None:
    x, y, new = torch.zeros(1), torch.zeros(1), torch.ones(1)
    note = object()
    other = _Inner(anchor=y, note=note)
    value = _Outer(x=x, counts=(1, 2), inner=_Inner(anchor=x, note=note), other=other)
    got = replace_tensors(value, {id(x): new})
    assert got.x is new
    assert got.inner.anchor is new
    assert got.inner.note is note
    assert got.counts is value.counts
    assert got.other is other
    assert replace_tensors([x, (y, 3)], {id(x): new}) == [new, (y, 3)]
