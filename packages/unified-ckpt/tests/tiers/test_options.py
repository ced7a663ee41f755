"""What a tier is told."""

import socket
from pathlib import Path
from typing import Any

import pytest

from unified_ckpt.errors import CheckpointError
from unified_ckpt.tiers.options import TierOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"folder": ""}, r"folder is ''"),
        ({"folder": "s3://bucket/run"}, "works on directories only"),
        ({"copies": -1}, r"copies=-1 must be 0 or more"),
        ({"copies": 1.5}, "copies is a float"),
        ({"node": 3}, "node is a int"),
        ({"max_bytes": 0}, "max_bytes=0 must be positive"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_values_that_cannot_be_used_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TierOptions(**{"folder": "/dev/shm/run", **given})


def test_a_node_is_named_by_option_then_environment_then_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UNIFIED_CKPT_NODE", raising=False)
    assert TierOptions(folder=tmp_path).node_name == socket.gethostname()
    monkeypatch.setenv("UNIFIED_CKPT_NODE", "rack-3")
    assert TierOptions(folder=tmp_path).node_name == "rack-3"
    assert TierOptions(folder=tmp_path, node="mine").node_name == "mine"


def test_another_process_of_the_node_gets_the_same(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    options = TierOptions(folder=tmp_path / "link", copies=2, node="n")
    fields = options.to_json()
    assert fields["folder"] == str(tmp_path.resolve() / "real")
    assert TierOptions(**fields).to_json() == fields
