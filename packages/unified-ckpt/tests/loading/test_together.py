from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import LoadOptions, SaveOptions, Shard, load, save
from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    LoadError,
    ReplacedCheckpointError,
)
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.plans.checkpoint.directory import Checkpoint


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_ranks_of_a_group_read_the_same_checkpoint_while_it_is_overwritten(tmp_path: Path) -> None:
    """Rank 2 overwrites without a pause; ranks 0 and 1 load half of the columns each."""

    def state(value: float, rank: int = 0, parts: int = 1) -> list[Shard]:
        tensor = torch.full((64, 128 // parts), float(value))
        offset = (0, rank * (128 // parts))
        return [
            Shard.of(f"w{n}", tensor.clone(), global_shape=(64, 128), offset=offset)
            for n in range(4)
        ]

    def fn(rank: int, world_size: int) -> list[float]:
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        readers = dist.new_group([0, 1])
        place, options = tmp_path / "c", SaveOptions(max_shard_bytes=64 * 128 * 4)
        if rank == 2:
            save({"model": state(0)}, checkpoint_id=place, group=alone, options=options)
        dist.barrier()
        if rank == 2:
            value = 0
            while not (tmp_path / "done-1").exists():
                value += 1
                save({"model": state(value)}, checkpoint_id=place, group=alone, options=options)
            return []
        seen = []
        while len(seen) < 15:
            wants = state(-1, rank, 2)
            try:
                load(wants, checkpoint_id=place, options=LoadOptions(group=readers, timeout_s=60))
            except ReplacedCheckpointError:
                seen.append(-2.0)  # told to both
                continue
            (value,) = {float(v) for want in wants for v in want.tensor.unique()}
            seen.append(value)
        (tmp_path / f"done-{rank}").touch()
        return seen

    first, second, _ = run_ranks(fn, 3, timeout_s=300)
    assert first == second and max(first) > 0, first


def test_a_checkpoint_that_is_replaced_between_opening_and_comparing_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Checkpoint.identity, list[str]()

    def write(value: float) -> None:
        alone = dist.new_group([0])
        state = {"model": {"w": torch.full((4,), value)}}
        save(state, checkpoint_id=tmp_path / "c", group=alone)

    def identity(checkpoint: Checkpoint) -> str:
        size_of = checkpoint.opened.size

        def size_and_replace(name: str) -> int | None:
            size = size_of(name)
            if not seen:
                seen.append(name)
                write(2.0)  # and with that the manifest that was found is gone
            return size

        monkeypatch.setattr(checkpoint.opened, "size", size_and_replace)
        return real.__get__(checkpoint)

    def fn(rank: int, world_size: int) -> list[float]:
        write(1.0)
        monkeypatch.setattr(Checkpoint, "identity", property(identity))
        state = {"model": {"w": torch.zeros(4)}}
        load(state, checkpoint_id=tmp_path / "c", options=LoadOptions(group=dist.group.WORLD))
        assert seen == [MANIFEST_NAME]
        return state["model"]["w"].tolist()

    assert run_ranks(fn, 1) == [[2.0] * 4]


def test_what_one_rank_of_a_group_cannot_load_all_of_it_refuse(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        options = LoadOptions(group=dist.group.WORLD, timeout_s=30)
        save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "c")
        said = []
        for wants in (
            {"model": {"w" if rank == 0 else "x": torch.zeros(3)}},
            {"model": {"w": torch.zeros(3)}} if rank == 0 else MappingProxyType({}),
        ):
            with pytest.raises(LoadError if not said else CheckpointValueError) as caught:
                load(wants, checkpoint_id=tmp_path / "c", options=options)
            said.append(str(caught.value))
        dist.barrier()
        if rank == 1:
            flip(tmp_path / "c" / "model.safetensors")
        dist.barrier()
        shard = Shard.of("w", torch.zeros(3), global_shape=(3,), offset=(0,))
        with pytest.raises(CorruptCheckpointError) as caught:
            load([shard] if rank else [], checkpoint_id=tmp_path / "c", options=options)
        return [*said, str(caught.value)]

    first, second = run_ranks(fn, 2)
    assert first == second
    assert "rank 1 failed in 'load': LoadError" in first[0] and "lacks 'x'" in first[0]
    assert "rank 1 failed in 'load': CheckpointTypeError" in first[1]
    assert first[2].startswith("rank 1: ") and "'w' is damaged" in first[2]
