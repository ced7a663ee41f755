"""The moving average, bit for bit against one process that replays all updates in fp32."""

import gc
import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ranktest import collect_ranks, run_ranks
from unified_ckpt import Shard, load, load_files, save
from unified_ckpt.background.async_saving import async_save
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.background.zero_cost import ZeroCostSaver
from unified_ckpt.errors import LoadError, SaveArgumentError, SaveError
from unified_ckpt.snapshots.average.ema import EmaConfig, EmaMemory
from unified_ckpt.snapshots.staging import StagingLayout
from unified_ckpt.tiers import TierOptions, held_copies

SHAPES = {"w": (37, 29), "v": (1001,), "s": ()}


def weights(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in SHAPES.items()}


def replay(config: EmaConfig, steps: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The definition, on whole tensors."""
    average: dict[str, torch.Tensor] = {}
    for number, step in enumerate(steps):
        decay = config.decay
        if config.warmup:
            decay = min(decay, (1 + number) / (10 + number))
        for key, weight in weights(step, dtype).items():
            weight = weight.float()
            if number == 0:
                average[key] = weight
            else:
                average[key] = average[key] + (weight - average[key]) * (1.0 - decay)
    return average


def cut(tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> list[Shard]:
    """Rows of `w` and pieces of `v`, uneven; `s` is a replica."""
    shards = []
    for key, tensor in tensors.items():
        if not tensor.dim():
            shards.append(Shard.of(key, tensor, global_shape=(), offset=()))
            continue
        ends = [tensor.shape[0] * (r + 1) ** 2 // world_size**2 for r in range(world_size)]
        begin, end = [0, *ends][rank], ends[rank]
        offset = (begin, *(0 for _ in tensor.shape[1:]))
        shards.append(
            Shard.of(key, tensor[begin:end], global_shape=tuple(tensor.shape), offset=offset)
        )
    return shards


def staged(layout: StagingLayout, shards: list[Shard]) -> torch.Tensor:
    memory = torch.zeros(max(layout.num_bytes, 1), dtype=torch.uint8)
    for view, shard in zip(layout.views(memory), shards, strict=True):
        view.copy_(shard.tensor)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warmup", [False, True])
def test_a_thousand_updates_in_every_layout_are_the_replay(
    dtype: torch.dtype, warmup: bool
) -> None:
    config = EmaConfig(decay=0.99, warmup=warmup)
    steps = [random.randrange(2**31) for _ in range(250)]  # four cases make the thousand
    want = replay(config, steps, dtype)
    for world_size in (1, 3):
        for rank in range(world_size):
            layout = StagingLayout.of({"model": cut(weights(0, dtype), rank, world_size)})
            average = EmaMemory.allocate(config, layout)
            for number, step in enumerate(steps, start=1):
                shards = cut(weights(step, dtype), rank, world_size)
                average.update(layout, staged(layout, shards), number=number, loss=None)
            assert average.num_updates == len(steps)
            for found, expected in zip(average.shards(), cut(want, rank, world_size), strict=True):
                assert torch.equal(found.tensor, expected.tensor), (found.key, steps[:3])


def test_a_kill_at_any_moment_of_an_update_is_made_good_by_doing_it_again() -> None:
    config, numel = EmaConfig(decay=0.9), 1_000_000
    tensors = [torch.full((numel,), float(n)) for n in range(1, 12)]
    shard = Shard.of("w", tensors[0], global_shape=(numel,), offset=(0,))
    layout = StagingLayout.of({"model": [shard]})
    want = tensors[0].clone()
    for tensor in tensors[1:]:
        want += (tensor - want) * (1.0 - config.decay)
    memories = [
        staged(layout, [Shard.of("w", t, global_shape=(numel,), offset=(0,))]) for t in tensors
    ]
    for _ in range(3):
        average = EmaMemory.allocate(config, layout)

        def fn(rank: int, world_size: int, average: EmaMemory = average) -> None:
            average.update(layout, memories[0], number=1, loss=None)
            delay_s = random.uniform(0.0, 0.03)
            subprocess.Popen(["sh", "-c", f"sleep {delay_s:.4f}; kill -9 {os.getpid()}"])
            for number in range(2, len(memories) + 1):
                average.update(layout, memories[number - 1], number=number, loss=None)
            time.sleep(60)

        (outcome,) = collect_ranks(fn, 1, timeout_s=30, init=False)
        assert outcome.error_type == "Died", outcome
        again = EmaMemory(config, layout, average.memory)  # as a new saver process attaches
        for number in range(1, len(memories) + 1):  # those that were done are not done twice
            again.update(layout, memories[number - 1], number=number, loss=None)
        assert again.num_updates == len(memories)
        assert torch.equal(again.shards()[0].tensor, want)


def test_losses_decide_what_is_taken_in() -> None:
    layout = StagingLayout.of({"model": cut(weights(0, torch.float32), 0, 1)})
    config = EmaConfig(decay=0.5, loss_threshold=2.0)
    average = EmaMemory.allocate(config, layout)
    taken = []
    for number, loss in enumerate([1.0, 3.0, 2.0, math.nan, math.inf, None], start=1):
        shards = cut(weights(number, torch.float32), 0, 1)
        before = average.num_updates
        average.update(layout, staged(layout, shards), number=number, loss=loss)
        taken.append(average.num_updates > before)
    assert taken == [True, False, True, False, False, True]
    want = replay(config, [1, 3, 6], torch.float32)
    for found in average.shards():
        assert torch.equal(found.tensor, want[found.key])


def test_what_is_not_floating_keeps_its_newest_value() -> None:
    count, mask = torch.tensor([1, 2]), torch.tensor([True, False])
    shards = [
        Shard.of(k, t, global_shape=(2,), offset=(0,))
        for k, t in (("count", count), ("mask", mask), ("half", torch.tensor([1.0, 2.0]).half()))
    ]
    layout = StagingLayout.of({"model": shards})
    average = EmaMemory.allocate(EmaConfig(decay=0.5), layout)
    average.update(layout, staged(layout, shards), number=1, loss=None)
    count += 5
    mask.logical_not_()
    average.update(layout, staged(layout, shards), number=2, loss=None)
    found = {shard.key: shard.tensor for shard in average.shards()}
    assert found["count"].tolist() == [6, 7] and found["mask"].tolist() == [False, True]
    assert found["half"].dtype == torch.float32


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decay=1.0 must be at least 0 and less than 1"):
        EmaConfig(decay=1.0)
    with pytest.raises(ValueError, match=r"source='ema' is the average; name"):
        EmaConfig(source="ema")
    with pytest.raises(ValueError, match=r"loss_threshold=nan takes nothing in"):
        EmaConfig(loss_threshold=math.nan)
    layout = StagingLayout.of({"optimizer": []})
    with pytest.raises(SaveArgumentError, match=r"of part 'model', but the snapshot has only"):
        EmaMemory.allocate(EmaConfig(), layout)
    average = EmaMemory.allocate(EmaConfig(), StagingLayout.of({"model": []}))
    with pytest.raises(LoadError, match=r"ema_state.json is malformed"):
        average.restore(b"{}")


def saver_config(config: EmaConfig | None) -> AsyncSaverConfig:
    return AsyncSaverConfig(ema=config, timeout_s=30.0, start_timeout_s=60.0, orphan_grace_s=1.0)


def test_savers_keep_the_average_across_kill_and_reshard(tmp_path: Path) -> None:
    config = EmaConfig(decay=0.95, warmup=True)
    dtype = torch.bfloat16

    def first(rank: int, world_size: int) -> list[int]:
        """Steps 0 to 14 on two ranks; rank 1's saver is killed while it has updates to do."""
        failed = []
        tensors = weights(0, dtype)
        state = {"model": cut(tensors, rank, world_size)}
        with AsyncSaver(config=saver_config(config)) as saver:
            zero_cost = ZeroCostSaver(saver, num_microbatches=2)
            zero_cost.prepare(state)
            for step in range(15):
                for key, tensor in weights(step, dtype).items():
                    tensors[key].copy_(tensor)
                try:
                    outcome = zero_cost.begin_save(state, checkpoint_id=None)
                    zero_cost.offload_chunk()
                    zero_cost.finish()
                    if rank == 1 and step == 8:
                        time.sleep(random.uniform(0.0, 0.005))
                        os.kill(saver.pid, signal.SIGKILL)
                        while not saver.saver_ended:
                            time.sleep(0.01)
                    outcome.result(timeout=60)
                except SaveError:
                    failed.append(step)
            zero_cost.begin_save(state, checkpoint_id=tmp_path / "checkpoint-1", loss=math.nan)
            zero_cost.close()
            saver.wait(timeout_s=60)
        return failed

    failed, failed_1 = run_ranks(first, 2, timeout_s=100)
    # What rank 0's saver took in, rank 1's new one has taken in as well.
    assert set(failed) <= set(failed_1) <= {8, 9} and failed_1, (failed, failed_1)
    done = [step for step in range(15) if step not in failed]
    state_file = json.loads(load_files(tmp_path / "checkpoint-1", "ema_state.json"))
    assert state_file["num_updates"] == len(done)
    assert_average(tmp_path / "checkpoint-1", replay(config, done, dtype))

    tensors = weights(0, dtype)
    state = {"model": cut(tensors, 0, 1)}
    before = open_averages()
    two_tiers = replace(saver_config(config), tier=TierOptions(folder=tmp_path / "fast"))
    with AsyncSaver(config=two_tiers) as saver:  # another layout: one rank
        saver.prepare(state)
        check_refusals(saver, state, tmp_path / "refused")
        saver.load_ema(tmp_path / "checkpoint-1")
        assert saver.ema_updates == len(done)
        for step in range(15, 20):
            for key, tensor in weights(step, dtype).items():
                tensors[key].copy_(tensor)
            if step == 18:
                state = move_to_pieces(saver, tensors)
            async_save(state, checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    want = replay(config, [*done, *range(15, 20)], dtype)
    assert_average(tmp_path / "checkpoint-2", want)
    (copy,) = held_copies(tmp_path / "fast")
    assert_average(tmp_path / "fast" / copy.name, want)
    with pytest.raises(SaveArgumentError, match="closed"):
        async_save(state, checkpoint_id=tmp_path / "checkpoint-3", saver=saver)
    with pytest.raises(SaveArgumentError, match="closed"):
        saver.prepare(state)
    del saver
    gc.collect()
    assert open_averages() == before


def move_to_pieces(
    saver: AsyncSaver, tensors: dict[str, torch.Tensor]
) -> dict[str, Sequence[Shard]]:
    """Let a saver with a snapshot under way go on with the average in the pieces of two ranks."""
    pieces = [*cut(tensors, 0, 2), *(shard for shard in cut(tensors, 1, 2) if shard.key != "s")]
    whole = {shard.key: shard.tensor.clone() for shard in saver.average()}
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    with pytest.raises(SaveArgumentError, match=r"average of \['v', 'w'\] is not in the boxes"):
        saver.move_average({"model": pieces}, cut(whole, 0, 1))
    moved = [*cut(whole, 0, 2), *cut(whole, 1, 2)]
    saver.move_average({"model": pieces}, moved)
    return {"model": pieces}


def open_averages() -> int:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum("moving-average" in link for link in links)


def check_refusals(saver: AsyncSaver, state: dict[str, list[Shard]], place: Path) -> None:
    """Each time anew, and without a trace in the average."""
    one = Shard.of("w", torch.ones(1), global_shape=(1,), offset=(0,))
    for _ in range(2):
        with pytest.raises(SaveArgumentError, match=r"'model' are not those of the moving average"):
            async_save({"model": [one]}, checkpoint_id=place, saver=saver)
        with pytest.raises(SaveArgumentError, match=r"part 'ema' is where the moving average is"):
            async_save({**state, "ema": [one]}, checkpoint_id=place, saver=saver)
        with pytest.raises(SaveArgumentError, match=r"file 'ema_state.json' is the moving"):
            async_save(state, checkpoint_id=place, saver=saver, files={"ema_state.json": b""})
    assert not place.exists()
    save(state, checkpoint_id=place)
    with pytest.raises(LoadError, match="ema"):
        saver.load_ema(place)
    assert saver.ema_updates == 0


def assert_average(checkpoint: Path, want: dict[str, torch.Tensor]) -> None:
    found = {key: torch.empty(shape) for key, shape in SHAPES.items()}
    load(cut(found, 0, 1), checkpoint_id=checkpoint, part="ema")
    for key, tensor in want.items():
        assert torch.equal(found[key], tensor), key
