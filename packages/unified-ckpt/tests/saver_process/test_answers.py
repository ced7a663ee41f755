import json
from pathlib import Path

import pytest

from unified_ckpt.errors import LoadError, SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.saver_process.answers import (
    MAX_MESSAGE_BYTES,
    error_from_json,
    error_to_json,
    report_from_json,
    report_to_json,
)
from unified_ckpt.saving import SaveReport


def test_a_report_survives_json() -> None:
    report = SaveReport(
        path=Path("/run/checkpoint-1"),
        num_files=3,
        num_bytes=10,
        rank_bytes=7,
        replaced=True,
        removed_leftovers=(Path("/run/.a"), Path("/run/.b")),
    )
    assert report_from_json(json.loads(json.dumps(report_to_json(report)))) == report


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (SaveError("a"), SaveError, "a"),
        (SavePeerError("b"), SavePeerError, "b"),
        (SaveArgumentError("c"), SaveArgumentError, "c"),
        (LoadError("d"), SaveError, "d"),
        (ValueError("e"), SaveError, "ValueError: e"),
    ],
)
def test_an_error_keeps_its_kind_and_text(error: Exception, kind: type, text: str) -> None:
    found = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert type(found) is kind and str(found) == text


def test_an_error_fits_into_a_message_whatever_its_letters() -> None:
    answer = {"kind": "done", "number": 1, "error": error_to_json(SaveError("\u8def" * 10**6))}
    assert len(json.dumps(answer).encode()) <= MAX_MESSAGE_BYTES
