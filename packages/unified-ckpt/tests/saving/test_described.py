"""What ranks tell each other, and when a plan is made anew."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ranktest import run_ranks
from unified_ckpt import Box, Shard, load, read_index, save, verify_checkpoint
from unified_ckpt.errors import SaveArgumentError
from unified_ckpt.node import NODE_VARIABLE
from unified_ckpt.options import SaveOptions
from unified_ckpt.saving import described
from unified_ckpt.saving.commit import Agreement


def half(key: str, rank: int, *, value: float = 0.0, columns: int = 4) -> Shard:
    tensor = torch.full((2, columns), rank + value)
    return Shard.of(key, tensor, global_shape=(4, columns), offset=(2 * rank, 0))


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes that this rank tells the others, by what they are."""
    told: dict[str, int] = {}
    gather = Agreement.gather_bytes

    def gather_bytes(self: Agreement, name: str, text: bytes, **more: Any) -> list[bytes]:
        told[name] = told.get(name, 0) + len(text)
        return gather(self, name, text, **more)

    monkeypatch.setattr(Agreement, "gather_bytes", gather_bytes)
    return told


def test_an_unchanged_layout_is_told_once_and_any_change_of_it_is_seen(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        changes: list[tuple[str, Callable[[], dict[str, Any]], SaveOptions]] = [
            ("first", lambda: {"model": [half("a", rank)], "n": 1}, SaveOptions()),
            ("values", lambda: {"model": [half("a", rank, value=0.5)], "n": 2}, SaveOptions()),
            ("key", lambda: {"model": [half("b", rank)]}, SaveOptions()),
            ("shape", lambda: {"model": [half("b", rank, columns=5)]}, SaveOptions()),
            ("as before", lambda: {"model": [half("a", rank)], "n": 3}, SaveOptions()),
            ("option", lambda: {"model": [half("b", rank)]}, SaveOptions(max_shard_bytes=99)),
        ]
        with pytest.MonkeyPatch.context() as patch:
            told = counted(patch)
            again = {"values"}  # two layouts are remembered, and there were three since the first
            for number, (name, state, options) in enumerate(changes):
                told.clear()
                place = tmp_path / f"checkpoint-{number}"
                save(state(), checkpoint_id=place, options=options)
                assert ("layouts" in told) == (name not in again), name
                assert verify_checkpoint(place).problems == ()
            told.clear()
            patch.setenv(NODE_VARIABLE, f"n{rank}")
            place = tmp_path / "checkpoint-9"
            save(changes[-1][1](), checkpoint_id=place, options=changes[-1][2])
            assert "layouts" in told  # ranks lie on other nodes now
        mine = {"model": [half("a", rank, value=9.0)], "n": 0}
        load(mine, checkpoint_id=tmp_path / "checkpoint-1")
        assert mine["model"][0].tensor.tolist() == half("a", rank, value=0.5).tensor.tolist()
        assert mine["n"] == 2

    run_ranks(fn, 2)


def test_a_rank_that_has_forgotten_the_plan_is_told_the_layouts(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        for number in range(3):
            if rank == 1 and number == 1:
                described.PLANS.__init__()  # type: ignore[misc]
            place = tmp_path / f"checkpoint-{number}"
            save({"model": [half("a", rank)]}, checkpoint_id=place)
            assert verify_checkpoint(place).problems == ()

    run_ranks(fn, 2)


def test_errors_of_a_layout_are_the_same_when_it_is_tried_again(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        hole = [Shard.of("w", torch.zeros(1), global_shape=(4,), offset=(rank,))]
        for _ in range(2):
            with pytest.raises(SaveArgumentError, match="no rank holds 1 of its 4 elements"):
                save({"model": hole}, checkpoint_id=tmp_path / "c")
        with pytest.raises(SaveArgumentError, match=r"ranks disagree about options: .*99"):
            save({}, checkpoint_id=tmp_path / "c", options=SaveOptions(max_shard_bytes=99 + rank))
        with pytest.raises(SaveArgumentError, match=r"'n' is 0 on rank 0, 1 on rank 2"):
            save({"n": rank // 2}, checkpoint_id=tmp_path / "c")
        assert not (tmp_path / "c").exists()

    run_ranks(fn, 3)


def test_ranks_of_two_nodes_write_no_file_together_and_all_loads_find_the_boxes(
    tmp_path: Path,
) -> None:
    full = torch.arange(64.0).view(8, 8)

    def fn(rank: int, world_size: int) -> None:
        os.environ[NODE_VARIABLE] = f"n{rank // 2}"
        box = Box.whole((8, 8)).chunk(0, num=4, index=rank)
        mine = full[2 * rank : 2 * rank + 2].clone()
        pair = Box.whole((8, 8)).chunk(1, num=2, index=rank % 2)
        copy = full[:, 4 * (rank % 2) : 4 * (rank % 2) + 4].clone()
        state = {"model": [Shard(key="over", tensor=mine, box=box),
                           Shard(key="copy", tensor=copy, box=pair)]}  # fmt: skip
        save(state, checkpoint_id=tmp_path / "nodes")
        options = SaveOptions(files_over_nodes=True)
        save(state, checkpoint_id=tmp_path / "shared", options=options)
        for name in ("nodes", "shared"):
            columns = torch.zeros(8, 2)
            wanted = Box.whole((8, 8)).chunk(1, num=4, index=rank)
            for key in ("over", "copy"):
                load([Shard(key=key, tensor=columns, box=wanted)], checkpoint_id=tmp_path / name)
                assert torch.equal(columns, full[:, 2 * rank : 2 * rank + 2])

    run_ranks(fn, 4)
    boxes = {f"over@{2 * r}:{2 * r + 2},0:8@8,8" for r in range(4)}
    assert set(read_index(tmp_path / "nodes")) == {"copy", *boxes}
    assert set(read_index(tmp_path / "shared")) == {"copy", "over"}


def test_keys_that_would_be_read_as_boxes_of_a_tensor_are_refused(tmp_path: Path) -> None:
    for key in ("w@0:4@8", "w@0:2,0:2@2,2", "w/moment1/scale@0:4"):
        with pytest.raises(SaveArgumentError, match="the form in which boxes of a tensor"):
            save({"model": {key: torch.zeros(4)}}, checkpoint_id=tmp_path / "c")
    state = {"model": {"w@0:4": torch.ones(4), "me@home": torch.ones(2)}}
    save(state, checkpoint_id=tmp_path / "c")
    again = {"model": {key: torch.zeros_like(t) for key, t in state["model"].items()}}
    load(again, checkpoint_id=tmp_path / "c")
    assert all(tensor.all() for tensor in again["model"].values())
