from pathlib import Path
from typing import Any

import pytest
import torch

from unified_ckpt import Shard
from unified_ckpt.options import SaveOptions
from unified_ckpt.snapshots.snapshot_request import SnapshotRequest, decode_request, encode_request

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(6.0).view(2, 3)},
    "optimizer": {"w/moment1": torch.rand(2, 3), "w/moment2": torch.rand(2, 3)},
    "progress": {"epoch": 3, "note": "größer \u2028"},
}


def test_a_request_is_the_same_on_the_other_side(tmp_path: Path) -> None:
    request, parts = SnapshotRequest.of(
        STATE,
        checkpoint_id=tmp_path / "checkpoint-1",
        files={"config.json": b"{}", "empty": b""},
        rank_files={"rng-0": bytes(range(256))},
        loss=float("inf"),
    )
    base, layout_json = 64, b"[layout]"
    encoded = encode_request(request, layout_json, base=base)
    memory = memoryview(bytearray(b"x" * (encoded.num_bytes + 5)))
    encoded.write(memory)
    assert bytes(memory[:base]) == b"x" * base and bytes(memory[-5:]) == b"x" * 5
    again, found_json = decode_request(memory, encoded.head)
    assert found_json == layout_json and again == request
    saved = again.save_request(parts)
    assert saved.target == (tmp_path / "checkpoint-1").resolve()
    assert saved.parts == parts and saved.rank_files == {"rng-0": bytes(range(256))}
    assert saved.values == request.fields["values"]


def test_moments_are_compressed_on_the_other_side_only() -> None:
    options = SaveOptions(moment_compression="int8")
    request, parts = SnapshotRequest.of(STATE, checkpoint_id="c", options=options)
    assert {shard.tensor.dtype for shard in parts["optimizer"]} == {torch.float32}
    saved = request.save_request(parts)
    assert torch.int8 in {shard.tensor.dtype for shard in saved.parts["optimizer"]}
    assert saved.options.moment_compression == "int8"


def test_a_snapshot_may_write_nothing() -> None:
    request, _ = SnapshotRequest.of({"model": []}, checkpoint_id=None)
    encoded = encode_request(request, b"[]", base=0)
    memory = memoryview(bytearray(encoded.num_bytes))
    encoded.write(memory)
    again, _ = decode_request(memory, encoded.head)
    assert again.checkpoint_id is None and again.loss is None


def test_what_cannot_be_sent_is_refused_before_anything_is_copied() -> None:
    shard = Shard.of("w", torch.zeros(1), global_shape=(1,), offset=(0,))
    state = {"model": [shard]}
    with pytest.raises(TypeError, match=r"file 'a' is a str; expected bytes"):
        SnapshotRequest.of(state, checkpoint_id="c", rank_files={"a": "x"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"loss is a Tensor; expected float or int"):
        SnapshotRequest.of(state, checkpoint_id="c", loss=torch.tensor(1.0))  # type: ignore[arg-type]
