"""Real ranks on nodes by name, each with a folder of its own: saved, copied, lost, found again."""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ranktest import collect_ranks, run_ranks
from unified_ckpt import SaveOptions, Shard, load, load_files
from unified_ckpt.errors import (
    CheckpointTypeError,
    DamagedCheckpointWarning,
    SaveArgumentError,
    SaveError,
)
from unified_ckpt.files.format import manifest
from unified_ckpt.tiers import NodeTier, TierOptions, held_copies, node_tier

NAMES = ["a", "b", "b", "c"]  # nodes of 1, 2 and 1 ranks


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, in which every node has one of its own."""
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as folder:
        yield Path(folder)


def options(memory: Path, node: str, **others: object) -> TierOptions:
    return TierOptions(folder=memory / node, node=node, timeout_s=60.0, **others)


def state(rank: int, world_size: int, step: float) -> dict[str, object]:
    """Cut along both dims over all ranks, whole on all, on one only, empty on most, and more."""
    torch.manual_seed(int(step))
    whole = {"rows": torch.randn(2 * world_size, 3), "columns": torch.randn(3, 2 * world_size)}
    rows = whole["rows"][2 * rank : 2 * rank + 2].clone()
    columns = whole["columns"][:, 2 * rank : 2 * rank + 2]  # strided
    last = rank == world_size - 1
    model = [
        Shard.of("rows", rows, global_shape=(2 * world_size, 3), offset=(2 * rank, 0)),
        Shard.of("columns", columns, global_shape=(3, 2 * world_size), offset=(0, 2 * rank)),
        Shard.of("scale", torch.tensor(float(step)), global_shape=(), offset=()),
        Shard.of(
            "few",
            torch.full((5 if last else 0,), float(step)),
            global_shape=(5,),
            offset=(0 if last else 5,),
        ),
    ]
    mine = [Shard.of(f"own-{rank}", torch.full((4,), step + rank), global_shape=(4,), offset=(0,))]
    return {"model": model, "optimizer": mine, "trainer": {"step": step, "names": ("x", 2)}}


def loaded(place: Path, rank: int, world_size: int) -> dict[str, object]:
    """What a fresh rank gets from a folder."""
    fresh = state(rank, world_size, 0)
    for part in ("model", "optimizer"):
        for shard in fresh[part]:
            shard.tensor.fill_(-1.0)
    load(fresh, checkpoint_id=place)
    assert load_files(place, f"rank-{rank}") == b"%d" % fresh["trainer"]["step"]
    return fresh


def check_state(place: Path, rank: int, world_size: int, step: int) -> None:
    found, right = loaded(place, rank, world_size), state(rank, world_size, step)
    assert found["trainer"] == right["trainer"]
    for part in ("model", "optimizer"):
        for got, wanted in zip(found[part], right[part], strict=True):
            assert torch.equal(got.tensor, wanted.tensor), (place, got.key)


def save_steps(tier: NodeTier, rank: int, world_size: int, *steps: int) -> None:
    for step in steps:
        tier.save(
            state(rank, world_size, step),
            step,
            files={"config.json": b"{}"},
            rank_files={f"rank-{rank}": b"%d" % step},
        )


def run_job(memory: Path, names: list[str], job: Callable[[NodeTier, int, int], object]) -> list:
    def fn(rank: int, world_size: int) -> object:
        with NodeTier(options(memory, names[rank])) as tier:
            return job(tier, rank, world_size)

    return run_ranks(fn, len(names), timeout_s=240)


def test_one_state_and_its_copies_lie_on_the_nodes_after_each_save(memory: Path) -> None:
    def job(tier: NodeTier, rank: int, world_size: int) -> int:
        save_steps(tier, rank, world_size, 1, 2)
        with pytest.raises(SaveArgumentError, match=r"ranks save different steps: \[3, 4, 4, 4\]"):
            tier.save({}, 3 if rank == 0 else 4)
        with pytest.raises(SaveArgumentError, match="step=-1 is negative"):
            tier.save({}, -1)
        with pytest.raises(SaveArgumentError, match=r"'node_copy.json' is the tier's"):
            tier.save({}, 3, files={"node_copy.json": b""})
        report = tier.save(state(rank, world_size, 5), 5)
        assert report.step == 5 and report.own.num_bytes > 0
        return report.kept_bytes

    kept_bytes = run_job(memory, NAMES, job)
    own = {"a": (0,), "b": (1, 2), "c": (3,)}
    before = {"a": "c", "b": "a", "c": "b"}
    for node, ranks in own.items():
        held = {copy.ranks: copy for copy in held_copies(memory / node)}
        assert set(held) == {ranks, own[before[node]]}
        assert {copy.step for copy in held.values()} == {5}
        copy = held[own[before[node]]]
        assert kept_bytes[ranks[0]] == copy.num_bytes
        for name, _ in copy.files:
            here, there = (memory / n / copy.name / name for n in (node, before[node]))
            assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_lost_node_is_made_good_from_its_peer_byte_for_byte(memory: Path, lost: str) -> None:
    run_job(memory, NAMES, lambda tier, rank, size: save_steps(tier, rank, size, 1, 2))
    shutil.rmtree(memory / lost)
    fresh = ["fresh" if name == lost else name for name in NAMES]

    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        found = tier.restore()
        assert found is not None and found[0] == 2
        check_state(found[1], rank, world_size, 2)
        assert found[1].is_relative_to(memory / fresh[rank])
        assert tier.restore(at_least=3) is None
        save_steps(tier, rank, world_size, 3)

    run_job(memory, fresh, job)
    assert {copy.step for copy in held_copies(memory / "fresh")} == {3}


def test_a_restore_brings_the_copies_back_as_well(memory: Path) -> None:
    """So that another node may be lost before the next save."""
    run_job(memory, NAMES, lambda tier, rank, size: save_steps(tier, rank, size, 1))
    for lost, names in (("b", ["a", "d", "d", "c"]), ("c", ["a", "d", "d", "e"])):
        shutil.rmtree(memory / lost)

        def job(tier: NodeTier, rank: int, world_size: int) -> None:
            found = tier.restore()
            assert found is not None
            check_state(found[1], rank, world_size, 1)

        run_job(memory, names, job)


def test_ranks_may_be_placed_on_nodes_in_another_way(memory: Path) -> None:
    run_job(memory, NAMES, lambda tier, rank, size: save_steps(tier, rank, size, 7))

    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        found = tier.restore()
        assert found is not None
        check_state(found[1], rank, world_size, 7)
        save_steps(tier, rank, world_size, 8)

    run_job(memory, ["c", "a", "b", "b"], job)
    run_job(memory, ["c"] * 4, lambda tier, *_: tier.restore() and None)


@pytest.mark.parametrize("damage", ["flip", "half"])
def test_a_damaged_copy_is_named_and_another_taken(memory: Path, damage: str) -> None:
    run_job(memory, NAMES, lambda tier, rank, size: save_steps(tier, rank, size, 4))
    (own,) = (copy for copy in held_copies(memory / "b") if copy.ranks == (1, 2))
    file = memory / "b" / own.name / next(name for name, _ in own.files if "model" in name)
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
        file.write_bytes(raw)
    else:
        file.write_bytes(raw[: len(raw) // 2])

    def job(tier: NodeTier, rank: int, world_size: int) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = tier.restore()
        assert found is not None
        check_state(found[1], rank, world_size, 4)
        return [str(each.message) for each in said]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCheckpointWarning)  # of the opening
        told = run_job(memory, NAMES, job)
    if damage == "flip":  # every rank hears of it; a half file is seen when the folder is listed
        assert all("node 'b'" in text and "is damaged" in text for (text,) in told), told


def test_without_a_whole_state_storage_is_left(memory: Path) -> None:
    run_job(memory, NAMES, lambda tier, rank, size: save_steps(tier, rank, size, 4))
    assert run_job(memory, NAMES[:3], lambda tier, *_: tier.restore()) == [None] * 3  # other world
    shutil.rmtree(memory / "b")
    shutil.rmtree(memory / "c")
    assert run_job(memory, NAMES, lambda tier, *_: tier.restore()) == [None] * 4


def test_another_layout_is_said_and_not_loaded(memory: Path) -> None:
    run_job(memory, ["a", "b"], lambda tier, rank, size: save_steps(tier, rank, size, 4))

    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        def load_whole(place: Path) -> None:
            shape = (2 * world_size, 3)
            load(
                [Shard.of("rows", torch.empty(shape), global_shape=shape, offset=(0, 0))],
                checkpoint_id=place,
            )

        with pytest.warns(DamagedCheckpointWarning, match="step 4 of the tier cannot be loaded"):
            assert tier.resume(load_whole) is None
        found = tier.resume(lambda place: check_state(place, rank, world_size, 4))
        assert found is not None

    run_job(memory, ["a", "b"], job)


def test_what_has_no_room_is_refused_before_it_is_written(memory: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        node = NAMES[rank]
        with NodeTier(options(memory, node)) as tier:
            save_steps(tier, rank, world_size, 1)
        held = sum(copy.num_bytes for copy in held_copies(memory / node))
        few = {"max_bytes": held + 1} if node == "c" else {}
        with NodeTier(options(memory, node, **few)) as tier:
            with pytest.raises(SaveError, match=r"node 'c' has room for .* nothing was written"):
                save_steps(tier, rank, world_size, 2)
            assert not list((memory / node).glob("*/.*")), "nothing is left"
            found = tier.restore()
            assert found is not None
            check_state(found[1], rank, world_size, 1)

    run_ranks(fn, 4, timeout_s=240)


def test_a_rank_that_fails_fails_the_save_everywhere_and_the_state_before_stays(
    memory: Path,
) -> None:
    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        save_steps(tier, rank, world_size, 1)
        bad = {"model": {"w": object()}} if rank == 2 else state(rank, world_size, 2)
        with pytest.raises(SaveError, match="rank 2 failed"):
            tier.save(bad, 2)
        found = tier.restore()
        assert found is not None and found[0] == 1
        check_state(found[1], rank, world_size, 1)
        save_steps(tier, rank, world_size, 3)

    run_job(memory, NAMES, job)


def test_one_node_alone_keeps_its_state_and_says_that_nothing_is_copied(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NodeTier(options(memory, "a")) as tier:  # no process groups either
        save_steps(tier, 0, 1, 1, 2)
        assert "1 nodes, so each has 0 copies on others instead of 1" in caplog.text
        found = tier.restore()
        assert found is not None
        check_state(found[1], 0, 1, 2)
        tier.clear()
        assert held_copies(memory / "a") == [] and tier.restore() is None


def test_copies_with_a_manifest_in_parts_are_whole(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "INLINE_BYTES", 0)  # as of millions of tensors
    run_job(memory, ["a", "b"], lambda tier, rank, size: save_steps(tier, rank, size, 1))
    copies = held_copies(memory / "a")
    assert len(copies) == 2
    assert all("manifest.bin" in dict(copy.files) for copy in copies)
    shutil.rmtree(memory / "b")

    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        found = tier.restore()
        assert found is not None
        check_state(found[1], rank, world_size, 1)

    run_job(memory, ["a", "fresh"], job)


def test_tied_tensors_are_stored_where_they_are_held(memory: Path) -> None:
    """The one that they stand for may lie on another node."""

    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        key = "head" if rank else "embedding"
        w = torch.arange(6.0).view(2, 3)
        tied = SaveOptions(tied={"head": "embedding"})
        tier.save({"model": {key: w}}, 1, options=tied)
        found = tier.restore()
        assert found is not None
        again = torch.empty(2, 3)
        load({"model": {key: again}}, checkpoint_id=found[1])
        assert torch.equal(again, w)

    run_job(memory, ["a", "b"], job)


def test_compressed_moments_come_back_as_from_a_checkpoint(memory: Path) -> None:
    def job(tier: NodeTier, rank: int, world_size: int) -> None:
        def moments(fill: float) -> list[Shard]:
            tensor = torch.full((64, 4), fill) + torch.arange(4.0) * (fill >= 0)
            shape = (64 * world_size, 4)
            return [Shard.of("w/moment1", tensor, global_shape=shape, offset=(64 * rank, 0))]

        saved = moments(1.0 + rank)
        tier.save({"optimizer": saved}, 1, options=SaveOptions(moment_compression="int8"))
        found, again = tier.restore(), moments(-1.0)
        assert found is not None
        load(again, checkpoint_id=found[1], part="optimizer")
        assert (again[0].tensor - saved[0].tensor).abs().max() <= saved[0].tensor.max() / 254

    run_job(memory, ["a", "b"], job)


def test_mistakes_are_named_on_every_rank(memory: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(CheckpointTypeError, match="options is a str"):
            NodeTier("/dev/shm/run")
        with pytest.raises(SaveArgumentError, match=r"ranks disagree about copies: \[1, 2\]"):
            NodeTier(options(memory, "a", copies=1 + rank))
        with pytest.raises(SaveArgumentError, match=r"ranks \[0, 1\] of node 'a' name several"):
            NodeTier(TierOptions(folder=memory / str(rank), node="a"))
        # Two nodes that name one folder, as on a file system that they share.
        node_tier._IN_USE_S = 0.2
        with pytest.raises(SaveError, match=r"shared has been in use by another process for 0\.2"):
            NodeTier(TierOptions(folder=memory / "shared", node=f"n{rank}"))

    outcomes = collect_ranks(fn, 2, timeout_s=120)
    assert all(outcome.ok for outcome in outcomes), outcomes
