"""Chunked snapshots: whatever happens outside of begin_save ... finish does not show in them."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from unified_ckpt import Shard, load
from unified_ckpt.background.async_saving import async_save
from unified_ckpt.background.pending_saves import PendingSave
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.background.zero_cost import ZeroCostSaver
from unified_ckpt.errors import SaveError


def shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    return [
        Shard.of(key, t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
        for key, t in tensors.items()
    ]


def state() -> dict[str, torch.Tensor]:
    """Large and small, strided, 0-dim, empty, and two views of one memory."""
    fused = torch.rand(4, 100, 30)
    tensors = {f"expert.{n}": fused[n] for n in range(4)}
    tensors["transposed"] = torch.rand(50, 700).t()
    tensors["scalar"] = torch.tensor(0.5)
    tensors["count"] = torch.tensor(7)
    tensors["empty"] = torch.empty(0, 4)
    tensors["bf16"] = torch.rand(333, 1001).to(torch.bfloat16)
    tensors["mask"] = torch.rand(77) > 0.5
    return tensors


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.mul_(3).add_(1)


def assert_saved(checkpoint: Path, want: dict[str, torch.Tensor], part: str = "model") -> None:
    found = {key: torch.empty(tuple(t.shape), dtype=t.dtype) for key, t in want.items()}
    load(shards(found), checkpoint_id=checkpoint, part=part)
    for key, tensor in want.items():
        assert torch.equal(found[key], tensor), (checkpoint.name, key)


def snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: t.detach().clone() for key, t in tensors.items()}


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_the_snapshot_is_the_step_boundary_at_every_legal_moment(
    saver: AsyncSaver, num_microbatches: int, tmp_path: Path
) -> None:
    zero_cost = ZeroCostSaver(saver, num_microbatches=num_microbatches)
    tensors = state()
    parts = {"model": shards(tensors)}
    zero_cost.prepare(parts)
    kept = {}
    for calls in range(num_microbatches + 3):  # fewer and more calls than chunks
        change(tensors)  # the last legal moment before
        kept[calls] = snapshot(tensors)
        zero_cost.begin_save(parts, checkpoint_id=tmp_path / f"checkpoint-{calls}")
        for _ in range(calls):
            zero_cost.offload_chunk()
        zero_cost.finish()
        change(tensors)  # the first legal moment after
    zero_cost.close()
    saver.wait(timeout_s=30)
    for calls, want in kept.items():
        assert_saved(tmp_path / f"checkpoint-{calls}", want)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_hooks_save_model_and_optimizer_of_a_training_loop(
    saver: AsyncSaver, num_microbatches: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    zero_cost = ZeroCostSaver(saver, num_microbatches=num_microbatches)
    zero_cost.attach(optimizer, model)
    kept, outcomes = {}, []
    for step in range(4):
        for _ in range(num_microbatches):
            model(torch.rand(5, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        moments = {
            f"{name}/{kind}": optimizer.state[weight][kind]
            for name, weight in weights.items()
            for kind in ("exp_avg", "exp_avg_sq", "step")
        }
        kept[step] = (snapshot(weights), snapshot(moments))
        parts = {"model": shards(weights), "optimizer": shards(moments)}
        outcomes.append(zero_cost.begin_save(parts, checkpoint_id=tmp_path / f"checkpoint-{step}"))
    zero_cost.close()
    assert not torch.equal(kept[0][0]["0.weight"], kept[3][0]["0.weight"])
    for step, outcome in enumerate(outcomes):
        assert outcome.result(timeout=30) is not None
        assert_saved(tmp_path / f"checkpoint-{step}", kept[step][0])
        assert_saved(tmp_path / f"checkpoint-{step}", kept[step][1], "optimizer")
    assert zero_cost.stall_s > 0


@pytest.mark.parametrize("clones", [False, True])
def test_buffers_that_a_forward_changes_are_found_unless_clones_are_given(
    saver: AsyncSaver, clones: bool, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_cost = ZeroCostSaver(saver, num_microbatches=1)
    zero_cost.attach(optimizer, model)
    tensors = model.state_dict()
    if clones:
        tensors |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    want = snapshot(tensors)
    outcome = zero_cost.begin_save(
        {"model": shards(tensors)}, checkpoint_id=tmp_path / "checkpoint-1"
    )
    model(torch.rand(5, 4)).square().mean().backward()
    if clones:
        optimizer.step()
        assert outcome.result(timeout=30) is not None
        assert_saved(tmp_path / "checkpoint-1", want)
    else:
        # torch counts no changes of the running mean and variance, but those of their number.
        with pytest.raises(SaveError, match=r"'1.num_batches_tracked'.* or give begin_save clones"):
            optimizer.step()
        with pytest.raises(SaveError, match="num_batches_tracked"):
            outcome.result(timeout=5)
    zero_cost.close()


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_change_during_the_snapshot_is_found_and_named(
    saver: AsyncSaver, calls: int, tmp_path: Path
) -> None:
    zero_cost = ZeroCostSaver(saver, num_microbatches=2)
    tensors = state()
    outcome = zero_cost.begin_save(
        {"model": shards(tensors)}, checkpoint_id=tmp_path / "checkpoint-1"
    )
    for _ in range(calls):
        zero_cost.offload_chunk()
    tensors["bf16"][0].zero_()  # through a view of it
    with pytest.raises(SaveError, match=r"1 tensors changed .*'bf16'; change them only after"):
        zero_cost.finish()
    with pytest.raises(SaveError, match="'bf16'"):
        outcome.result(timeout=5)
    want = snapshot(tensors)
    zero_cost.begin_save({"model": shards(tensors)}, checkpoint_id=tmp_path / "checkpoint-2")
    zero_cost.close()
    saver.wait(timeout_s=30)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]
    assert_saved(tmp_path / "checkpoint-2", want)


def test_a_second_snapshot_ends_the_first_and_async_saves_go_between(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    zero_cost = ZeroCostSaver(saver, num_microbatches=4)
    tensors = state()
    parts = {"model": shards(tensors)}
    first = snapshot(tensors)
    zero_cost.begin_save(parts, checkpoint_id=tmp_path / "checkpoint-1")
    async_save(parts, checkpoint_id=tmp_path / "checkpoint-2", saver=saver)
    zero_cost.finish()
    change(tensors)
    zero_cost.begin_save(parts, checkpoint_id=tmp_path / "checkpoint-3")
    zero_cost.begin_save(parts, checkpoint_id=tmp_path / "checkpoint-4")
    zero_cost.close()
    saver.wait(timeout_s=30)
    for number, want in ((1, first), (2, first), (3, snapshot(tensors)), (4, snapshot(tensors))):
        assert_saved(tmp_path / f"checkpoint-{number}", want)


def test_a_snapshot_that_is_not_finished_when_the_saver_closes_says_that_it_is_lost(
    tmp_path: Path,
) -> None:
    saver = AsyncSaver()
    zero_cost = ZeroCostSaver(saver, num_microbatches=4)
    outcome = zero_cost.begin_save({"model": shards(state())}, checkpoint_id=tmp_path / "c")
    async_save({"model": shards(state())}, checkpoint_id=tmp_path / "after", saver=saver)
    with pytest.raises(SaveError, match=r"snapshot 1 was begun, but not finished .* not saved"):
        saver.close()
    with pytest.raises(SaveError, match=r"call ZeroCostSaver\.finish\(\) or close\(\) before"):
        outcome.result(timeout=5)
    assert [path.name for path in tmp_path.iterdir()] == ["after"]


def test_what_ends_a_training_is_raised_beside_a_snapshot_that_is_lost(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, AsyncSaver() as saver:
        zero_cost = ZeroCostSaver(saver, num_microbatches=4)
        zero_cost.begin_save({"model": shards(state())}, checkpoint_id=tmp_path / "c")
        1 / 0  # noqa: B018 - what a training step may do
    assert "snapshot 1 was begun, but not finished" in caught.value.__notes__[0]


def test_no_micro_batch_at_all_is_refused(saver: AsyncSaver) -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=0 must be at least 1"):
        ZeroCostSaver(saver, num_microbatches=0)
    with pytest.raises(ValueError, match=r"timeout_s=0 must be a positive number"):
        ZeroCostSaver(saver, num_microbatches=1, timeout_s=0)


def test_a_copy_that_fails_in_a_hook_fails_its_snapshot_and_no_other(
    saver: AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose copies cannot be begun; here the snapshot is told of a foreign one."""
    zero_cost = ZeroCostSaver(saver, num_microbatches=2)
    tensors = {"w": torch.rand(10), "v": torch.rand(3)}
    parts = {"model": shards(tensors)}
    reserve = saver.reserve

    def reserve_foreign(*args: Any, **fields: Any) -> tuple[PendingSave, list[torch.Tensor]]:
        pending, sources = reserve(*args, **fields)
        return pending, [torch.empty_like(source, device="meta") for source in sources]

    with monkeypatch.context() as patch:
        patch.setattr(saver, "reserve", reserve_foreign)
        outcome = zero_cost.begin_save(parts, checkpoint_id=tmp_path / "checkpoint-1")
    zero_cost.offload_chunk()
    with pytest.raises(SaveError, match=r"copying the state failed: .*device"):
        zero_cost.finish()
    assert isinstance(outcome.exception(timeout=5), SaveError)
    zero_cost.begin_save(parts, checkpoint_id=tmp_path / "checkpoint-2")
    zero_cost.close()
    saver.wait(timeout_s=30)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert_saved(tmp_path / "checkpoint-2", tensors)


@pytest.mark.gpu(needs="time that copies of a device take")
def test_device_states_are_saved_as_they_were_and_cost_less_than_a_pinned_copy(
    saver: AsyncSaver, tmp_path: Path
) -> None:
    weight = torch.rand(64, 1 << 20, device="cuda")
    offloaded = torch.rand(1 << 20)  # a moment that the optimizer keeps on the CPU
    state = {"model": shards({"w": weight}), "optimizer": shards({"w/moment1": offloaded})}
    pinned = torch.empty(weight.shape, pin_memory=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    pinned.copy_(weight, non_blocking=True)
    torch.cuda.synchronize()
    copy_s = time.perf_counter() - started
    zero_cost = ZeroCostSaver(saver, num_microbatches=8)
    zero_cost.prepare(state)
    work, product = torch.rand(2, 4096, 4096, device="cuda")
    torch.mm(work, work, out=product)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        weight.fill_(float(step))
        offloaded.fill_(float(step))
        saved = zero_cost.begin_save(state, checkpoint_id=tmp_path / f"checkpoint-{step}")
        for _ in range(8):
            zero_cost.offload_chunk()
            for _ in range(4):
                torch.mm(work, work, out=product)
            torch.cuda.synchronize()  # a microbatch ends with a loss that the host reads
        zero_cost.finish()
        weight.fill_(-1.0)
        offloaded.fill_(-1.0)
        saved.result(timeout=60)  # there are more steps than saves
    assert torch.cuda.max_memory_allocated() == before
    assert zero_cost.stall_s / 3 < copy_s
    weight.fill_(3.0)
    response = async_save(
        {"model": state["model"]}, checkpoint_id=tmp_path / "checkpoint-3", saver=saver
    )
    weight.fill_(-1.0)
    response.staging_completion.result(timeout=30)
    zero_cost.close()
    saver.wait(timeout_s=60)
    for step in range(4):
        want = {"w": torch.full(tuple(weight.shape), float(step))}
        assert_saved(tmp_path / f"checkpoint-{step}", want)
