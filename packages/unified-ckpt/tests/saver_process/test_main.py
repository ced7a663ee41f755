"""What a saver process does with snapshots, asked as its trainer asks, but without a process."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unified_ckpt import Shard, load, load_files, read_index
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.geometry.tensors.memory import byte_view
from unified_ckpt.saver_process.main import SaverWorker
from unified_ckpt.snapshots.average.ema import EMA_FILE, EmaConfig, EmaMemory
from unified_ckpt.snapshots.shared_memory import SharedMemory
from unified_ckpt.snapshots.snapshot_request import SnapshotRequest, encode_request
from unified_ckpt.snapshots.staging import StagingLayout, tensors_of
from unified_ckpt.tiers import TierOptions, held_copies


@pytest.fixture
def fast() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as folder:
        yield Path(folder)


def state(value: float, rows: int = 100) -> dict[str, list[Shard]]:
    tensor = torch.full((rows, 7), float(value))
    return {"model": [Shard.of("w", tensor, global_shape=(rows, 7), offset=(0, 0))]}


def value_of(checkpoint: Path, part: str = "model") -> float:
    (shard,) = state(-1.0)["model"]
    load([shard], checkpoint_id=checkpoint, part=part)
    (value,) = set(shard.tensor.flatten().tolist())
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Trainer:
    """The other side, as far as a worker sees it."""

    def __init__(self, config: AsyncSaverConfig) -> None:
        self.config = config
        self.number = 0
        self.average: EmaMemory | None = None
        self.worker = self.new_worker()

    def new_worker(self) -> SaverWorker:
        return SaverWorker({**self.config.to_json(), "rank": 0, "size": 1, "store": None})

    def use(
        self,
        parts: dict[str, list[Shard]],
        place: Path | None,
        *,
        loss: float | None = None,
        replay: bool = False,
    ) -> dict[str, Any]:
        request, shards = SnapshotRequest.of(parts, checkpoint_id=place, loss=loss)
        layout = StagingLayout.of(shards)
        encoded = encode_request(
            request, json.dumps(layout.to_json()).encode(), base=layout.num_bytes
        )
        memory = SharedMemory.allocate(encoded.num_bytes, purpose="a test")
        encoded.write(byte_view(memory.tensor))
        for view, tensor in zip(layout.views(memory.tensor), tensors_of(shards), strict=True):
            view.copy_(tensor)
        fds = [memory.fd]
        if self.config.ema is not None:
            self.average = self.average or EmaMemory.allocate(self.config.ema, layout)
            fds.append(os.dup(self.average.memory.fd))
        self.number += 1
        message = {"number": self.number, "head": encoded.head, "replay": replay}
        return self.worker.run(message, fds)


def test_a_checkpoint_is_saved_on_the_node_before_storage_or_only_there(
    fast: Path, tmp_path: Path
) -> None:
    trainer = Trainer(AsyncSaverConfig(tier=TierOptions(folder=fast)))
    for step in (1, 2):
        assert "error" not in trainer.use(state(step), tmp_path / f"checkpoint-{step}")
    (copy,) = held_copies(fast)
    assert copy.step == 2 and value_of(fast / copy.name) == 2.0
    answer = trainer.use(state(3), fast / "checkpoint-3")
    (copy,) = held_copies(fast)
    assert answer["report"]["path"] == str(fast / copy.name)
    assert value_of(fast / copy.name) == 3.0
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    # What the node cannot take, the storage has all the same, and it is said.
    (fast / "ranks-00000").rename(fast / "aside")
    (fast / "ranks-00000").write_text("in the way")
    kind, text = trainer.use(state(4), tmp_path / "checkpoint-4")["error"]
    assert kind == "SaveError"
    assert "checkpoint-4 is committed, but not in the tier" in text
    assert value_of(tmp_path / "checkpoint-4") == 4.0
    kind, text = trainer.use(state(5), fast / "checkpoint-5")["error"]
    assert "ranks-00000" in text
    kind, text = trainer.use(state(6), tmp_path / "other")["error"]
    assert "other is not named checkpoint-N" in text


def test_descriptors_of_buffers_that_are_used_no_more_are_closed(tmp_path: Path) -> None:
    trainer = Trainer(AsyncSaverConfig(num_buffers=2))
    before = len(os.listdir("/proc/self/fd"))
    for step in range(8):  # each in another buffer
        assert "error" not in trainer.use(state(step, rows=100 + step), None)
    # The last num_buffers + 1, each with the descriptor that its mapping keeps.
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 3 + 2


def test_an_average_is_saved_once_there_is_one(tmp_path: Path) -> None:
    trainer = Trainer(AsyncSaverConfig(ema=EmaConfig(decay=0.5)))
    first = tmp_path / "checkpoint-1"
    assert "error" not in trainer.use(state(8.0), first, loss=math.nan)  # not taken in
    assert "ema_state.json" not in names(first) and value_of(first) == 8.0
    with pytest.raises(Exception, match="ema"):
        read_index(first, "ema")
    trainer.use(state(4.0), None)
    trainer.use(state(2.0), tmp_path / "checkpoint-2")
    assert value_of(tmp_path / "checkpoint-2", "ema") == 3.0
    assert json.loads(load_files(tmp_path / "checkpoint-2", EMA_FILE))["num_updates"] == 2


def test_a_new_process_redoes_what_the_dead_one_had_not_taken_in(tmp_path: Path) -> None:
    trainer = Trainer(AsyncSaverConfig(ema=EmaConfig(decay=0.5)))
    trainer.use(state(4.0), None)
    trainer.worker = trainer.new_worker()
    answer = trainer.use(state(2.0), tmp_path / "checkpoint-2", replay=True)
    assert answer["report"] is None and names(tmp_path) == []
    assert trainer.average is not None and trainer.average.num_updates == 2
    trainer.number -= 1  # the same once more
    trainer.use(state(2.0), None, replay=True)
    assert trainer.average.num_updates == 2
    assert trainer.average.shards()[0].tensor.unique().tolist() == [3.0]


def test_what_goes_wrong_is_an_answer(tmp_path: Path) -> None:
    trainer = Trainer(AsyncSaverConfig())
    (tmp_path / "taken").write_text("a file")
    kind, text = trainer.use(state(1.0), tmp_path / "taken")["error"]
    assert kind in ("SaveError", "SaveArgumentError") and "is not a directory" in text
    assert "error" not in trainer.use(state(1.0), tmp_path / "checkpoint-1")
