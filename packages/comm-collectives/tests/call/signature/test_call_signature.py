"""Heads of frames: what is packed comes out; what must agree changes the fingerprint."""

import dataclasses

import pytest

from comm_collectives.call.frames.link import SIGNATURE_BYTES
from comm_collectives.call.signature.call_signature import (
    MAX_ARGUMENTS,
    Argument,
    CallSignature,
    SignatureWords,
    operation_word,
)
from comm_collectives.call.signature.callsite import CallSite

_HEAD = CallSignature(
    name="all_gather",
    number=7,
    site=CallSite("train.py:3", 12345),
    arguments=(Argument("dtype", 11, "float32"), Argument("shape", -(1 << 63), "(2,)")),
    status=3,
    rolling=-5,
)


def test_words_are_what_was_packed() -> None:
    data = _HEAD.pack()
    words = SignatureWords.unpack(data)
    assert len(data) == SIGNATURE_BYTES
    assert words[:5] == (3, 7, operation_word("all_gather"), 12345, -5)
    assert words.arguments == (11, -(1 << 63), *[0] * (MAX_ARGUMENTS - 2))
    assert words.operation_name == "all_gather"
    assert words._replace(operation=1).operation_name == "another operation"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "all_reduce"},
        {"site": CallSite("train.py:4", 12346)},
        {"arguments": (Argument("dtype", 12),)},
        {"compares_site": False},
    ],
)
def test_fingerprint_depends_on_what_must_agree(change: dict[str, object]) -> None:
    assert dataclasses.replace(_HEAD, **change).fingerprint(9) != _HEAD.fingerprint(9)


def test_fingerprint_depends_on_the_calls_before_and_not_on_the_status() -> None:
    assert _HEAD.fingerprint(1) != _HEAD.fingerprint(2)
    assert dataclasses.replace(_HEAD, status=0).fingerprint(1) == _HEAD.fingerprint(1)


def test_description_names_operation_arguments_and_place() -> None:
    assert _HEAD.describe() == "all_gather(dtype=float32, shape=(2,)) at train.py:3"
