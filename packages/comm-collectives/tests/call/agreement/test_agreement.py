"""Verdicts on heads: every rank comes to the same, and the right one."""

import dataclasses

import pytest

from comm_collectives.call.agreement.agreement import (
    AgreementPolicy,
    compare,
    mismatch_error,
    refused_error,
)
from comm_collectives.call.signature.call_signature import (
    Argument,
    CallSignature,
    SignatureWords,
    Status,
)
from comm_collectives.call.signature.callsite import CallSite
from comm_collectives.errors import RefusedError, RefusedTypeError

_HEAD = CallSignature(
    name="all_reduce",
    number=7,
    site=CallSite("train.py:3", 1),
    arguments=(Argument("dtype", 11, "float32"), Argument("op", 0, "sum")),
)


def _verdicts(*heads: CallSignature) -> list[object]:
    words = [SignatureWords.unpack(head.pack()) for head in heads]
    return [compare(words, own) for own in heads]


def _change(**fields: object) -> CallSignature:
    return dataclasses.replace(_HEAD, **fields)


def test_equal_heads_agree_and_flags_add_up() -> None:
    for comparison in _verdicts(_change(status=1), _change(status=4), _HEAD):
        assert comparison.agrees
        assert comparison.flags == 5
        assert comparison.awaited == ()


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"name": "all_to_all"}, ("operation",)),
        ({"number": 8}, ("call number",)),
        ({"site": CallSite("train.py:4", 2)}, ("call site",)),
        ({"arguments": (Argument("dtype", 11), Argument("op", 1))}, ("op",)),
        ({"arguments": (Argument("dtype", 9), Argument("op", 1))}, ("dtype", "op")),
        ({"rolling": 5}, ("an earlier call",)),
    ],
)
def test_what_differs_is_named_on_every_rank(
    change: dict[str, object], differing: tuple[str, ...]
) -> None:
    for comparison in _verdicts(_HEAD, _change(**change), _HEAD):
        assert not comparison.agrees
        assert comparison.differing == differing


def test_refusal_counts_more_than_the_arguments_that_it_lacks() -> None:
    refusing = _change(arguments=(), status=Status.REFUSED)
    for comparison in _verdicts(_HEAD, refusing):
        assert comparison.refused == (1,)
        assert comparison.differing == ()


def _backward(number: int) -> CallSignature:
    return _change(name="x (backward)", arguments=(Argument("of", number),), status=Status.BACKWARD)


def test_backwards_in_which_not_all_are_are_awaited() -> None:
    for comparison in _verdicts(_backward(5), _HEAD, _backward(5)):
        assert comparison.awaited == (5,)
        assert comparison.differing == ("operation",)
    for comparison in _verdicts(_backward(6), _backward(5)):
        assert comparison.awaited == (5, 6)
        assert comparison.differing == ("of",)


def test_backward_in_which_all_are_is_compared_as_any_call() -> None:
    late = dataclasses.replace(_backward(5), number=8)
    for comparison in _verdicts(_backward(5), late):
        assert comparison.awaited == ()
        assert comparison.differing == ("call number",)


def test_error_groups_ranks_that_say_the_same() -> None:
    text = str(mismatch_error("call", ("op", "dtype", "shape"), ["a", "b", "a"], (0, 4, 8)))
    assert text == "call: op, dtype and shape differ between ranks: ranks 0, 8: a; rank 4: b"


def test_refusals_keep_their_kind() -> None:
    error = refused_error("call", [0, Status.REFUSED], ["fine", "too long"], (2, 3))
    assert type(error) is RefusedError
    assert str(error) == "call refused: rank 3: too long"
    both = refused_error("call", [Status.REFUSED | Status.REFUSED_TYPE], ["no tensor"], (2,))
    assert type(both) is RefusedTypeError
    assert isinstance(both, TypeError)
    assert isinstance(both, ValueError)


def test_policy_has_no_negative_or_broken_interval() -> None:
    with pytest.raises(TypeError, match=r"every=1.5 is a float; give an int"):
        AgreementPolicy(every=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=-1 must be >= 0"):
        AgreementPolicy(every=-1)
