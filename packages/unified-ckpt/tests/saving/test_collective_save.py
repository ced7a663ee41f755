import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist

from ranktest import collect_ranks, run_ranks
from unified_ckpt import Shard, get_last_checkpoint, load, save, verify_checkpoint
from unified_ckpt.errors import SaveArgumentError, SaveError, SavePeerError
from unified_ckpt.options import SaveOptions

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return box(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def box(key: str, tensor: torch.Tensor, global_shape: tuple, offset: tuple) -> Shard:
    return Shard.of(key, tensor, global_shape=global_shape, offset=offset)


def bits(tensor: torch.Tensor) -> list[int]:
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).tolist()


def stored(folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{part}*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def hidden(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_every_dtype_and_shape_opens_in_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {}
    for dtype in DTYPES:
        size = dtype.itemsize
        for name, shape in {"matrix": (3, 4), "empty": (0, 4), "vector": (5,)}.items():
            raw = torch.randint(0, 2, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
            tensors[f"{dtype}-{name}"] = raw.view(dtype)
        if dtype != torch.float4_e2m1fn_x2:
            tensors[f"{dtype}-scalar"] = torch.ones(size, dtype=torch.uint8).view(dtype).view(())
    save({"model": [whole(k, t) for k, t in tensors.items()]}, checkpoint_id=tmp_path / "c")
    found = stored(tmp_path / "c")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key
    with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        piece = file.get_slice("torch.int64-matrix")[1:2]
        assert bits(piece) == bits(tensors["torch.int64-matrix"][1:2])
    back = {}
    for key, tensor in tensors.items():
        raw = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        back[key] = raw.view(tensor.dtype).view(tensor.shape)
    load([whole(k, t) for k, t in back.items()], checkpoint_id=tmp_path / "c")
    assert all(bits(back[key]) == bits(tensors[key]) for key in tensors)


def test_views_of_every_kind_are_saved_as_their_values(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    views = {
        "transposed": base.T,
        "columns": base[:, 2:5],
        "stepped": base[::2, ::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "leaf": torch.randn(3, requires_grad=True),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
        "fp8": torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float8_e4m3fn).T,
    }
    save({"model": [whole(k, v) for k, v in views.items()]}, checkpoint_id=tmp_path / "c")
    found = stored(tmp_path / "c")
    for key, view in views.items():
        assert bits(found[key]) == bits(view.detach().resolve_conj().resolve_neg()), key


def test_a_fused_parameter_becomes_many_stored_tensors(tmp_path: Path) -> None:
    fused = torch.randn(4, 6, 5)
    shards = [
        Shard.of(f"experts.{e}.{name}.weight", part, global_shape=(3, 5), offset=(0, 0))
        for e in range(4)
        for name, part in (("gate_proj", fused[e, :3]), ("up_proj", fused[e, 3:]))
    ]
    save({"model": shards}, checkpoint_id=tmp_path / "c")
    assert torch.equal(stored(tmp_path / "c")["experts.2.up_proj.weight"], fused[2, 3:])
    again = torch.zeros_like(fused)
    load(
        [
            Shard.of(f"experts.{e}.{name}.weight", part, global_shape=(3, 5), offset=(0, 0))
            for e in range(4)
            for name, part in (("gate_proj", again[e, :3]), ("up_proj", again[e, 3:]))
        ],
        checkpoint_id=tmp_path / "c",
    )
    assert torch.equal(again, fused)


def test_tensors_of_many_chunks_split_by_columns_are_exact(tmp_path: Path) -> None:
    w = torch.arange(4099 * 3001, dtype=torch.float32).view(4099, 3001)

    def fn(rank: int, world_size: int) -> tuple[int, int]:
        begin, end = ((0, 1000), (1000, 3001))[rank]
        save({"model": [box("w", w[:, begin:end], (4099, 3001), (0, begin))]}, checkpoint_id=folder)
        same, rows = torch.zeros(4099, end - begin), torch.zeros(2000, 3001)
        same_report = load([box("w", same, (4099, 3001), (0, begin))], checkpoint_id=folder)
        rows_report = load([box("w", rows, (4099, 3001), (1999 * rank, 0))], checkpoint_id=folder)
        assert torch.equal(same, w[:, begin:end])
        assert torch.equal(rows, w[1999 * rank : 1999 * rank + 2000])
        assert same_report.verified_bytes == same_report.num_bytes == same.numel() * 4
        return rows_report.num_bytes, rows.numel() * 4

    folder = tmp_path / "c"
    for read, needed in run_ranks(fn, 2):
        assert read == needed
    assert torch.equal(stored(folder)["w"], w)
    assert verify_checkpoint(folder).problems == ()


def test_files_of_each_rank_and_of_the_first_rank_are_kept(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        save(
            {"model": [whole("w", torch.ones(3))]},
            checkpoint_id=tmp_path / "c",
            files={"config.json": b"{}", "a/b.txt": b"nested", "empty": b""},
            rank_files={f"rng-rank-{rank:05d}.bin": bytes([rank]) * 10},
        )

    run_ranks(fn, 2)
    assert (tmp_path / "c" / "a" / "b.txt").read_bytes() == b"nested"
    assert (tmp_path / "c" / "rng-rank-00001.bin").read_bytes() == b"\x01" * 10
    listed = json.loads((tmp_path / "c" / "manifest.json").read_bytes())["files"]
    assert sorted(listed) == [
        "a/b.txt", "config.json", "empty", "model.safetensors",
        "rng-rank-00000.bin", "rng-rank-00001.bin",
    ]  # fmt: skip
    assert verify_checkpoint(tmp_path / "c").problems == ()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_nothing_and_parts_that_differ_by_rank_are_saved(
    world_size: int, tmp_path: Path
) -> None:
    def fn(rank: int, world_size: int) -> int:
        parts = {"model": [whole(f"w{rank}", torch.full((3,), float(rank)))]} if rank else {}
        if rank == 1:
            parts["optimizer"] = [whole("step", torch.tensor(7))]
        return save(parts, checkpoint_id=tmp_path / "c").rank_bytes

    sizes = run_ranks(fn, world_size)
    assert sizes[:2] == [0, 20]
    assert sorted(stored(tmp_path / "c")) == [f"w{r}" for r in range(1, world_size)]
    assert stored(tmp_path / "c", "optimizer")["step"].item() == 7
    assert verify_checkpoint(tmp_path / "c").problems == ()


def test_a_subgroup_saves_alone(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        group = groups[rank % 2]
        tensor = torch.full((2,), float(rank))
        shard = box("w", tensor, (4 - 2 * (rank % 2),), (rank // 2 * 2,))
        save({"model": [shard]}, checkpoint_id=tmp_path / f"c{rank % 2}", group=group)
        if rank != 1:
            with pytest.raises(SaveArgumentError, match="not in the group"):
                save({}, checkpoint_id=tmp_path / "d", group=groups[1])

    run_ranks(fn, 3)
    assert stored(tmp_path / "c0")["w"].tolist() == [0, 0, 2, 2]
    assert stored(tmp_path / "c1")["w"].tolist() == [1, 1]


def test_an_overwrite_replaces_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "new" / "parents" / "c"
    first = save({"model": [whole("a", torch.ones(2))]}, checkpoint_id=target, files={"x": b"1"})
    second = save({"model": [whole("b", torch.zeros(2))]}, checkpoint_id=str(target))
    assert (first.replaced, second.replaced) == (False, True)
    assert sorted(p.name for p in target.iterdir()) == ["manifest.json", "model.safetensors"]
    assert sorted(stored(target)) == ["b"]
    assert hidden(target.parent) == []


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    for value in (1.0, 2.0):
        save({"model": [whole("w", torch.full((2,), value))]}, checkpoint_id=tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert stored(tmp_path / "c")["w"].tolist() == [2, 2]


def test_folders_that_are_no_checkpoints_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(SaveArgumentError, match=r"no manifest.json.*choose another checkpoint_id"):
        save({"model": [whole("w", torch.ones(2))]}, checkpoint_id=tmp_path / "thesis")
    with pytest.raises(SaveArgumentError, match="not a directory"):
        save({"model": []}, checkpoint_id=tmp_path / "thesis" / "chapter.tex")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    save({"model": [whole("w", torch.ones(2))]}, checkpoint_id=tmp_path / "empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_dict": {"Model": []}}, "part 'Model' must be of lower-case"),
        ({"state_dict": {"model": [torch.ones(2)]}}, "a shard is a Tensor; expected Shard"),
        ({"files": {"../x": b""}}, "must be a plain relative path"),
        ({"files": {"/x": b""}}, "must be a plain relative path"),
        ({"files": {"x//y": b""}}, "must be a plain relative path"),
        ({"files": {"x": "text"}}, "is a str; expected bytes"),
        ({"files": {"manifest.json": b""}}, r"would write \['manifest.json'\]"),
        ({"files": {"x": b""}, "rank_files": {"x": b""}}, r"would write \['x'\]"),
        ({"state_dict": {"model": []}, "files": {"model.safetensors": b""}}, "would write"),
        ({"options": SaveOptions(max_shard_bytes=0)}, "max_shard_bytes=0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        save(**{"state_dict": {}, **arguments}, checkpoint_id=tmp_path / "c")
    assert isinstance(caught.value, SaveArgumentError)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_on_one_rank_raises_on_all_and_the_group_stays_usable(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        messages = []
        for name, parts in {
            "hole": {"model": [box("w", torch.ones(1), (9,), (rank,))]},
            "type": {"model": [whole("w", torch.ones(2)), *([None] if rank == 1 else [])]},
        }.items():
            with pytest.raises(SaveArgumentError) as caught:
                save(parts, checkpoint_id=tmp_path / name)
            messages.append(str(caught.value))
        with pytest.raises(SaveArgumentError, match="ranks disagree about target"):
            save({}, checkpoint_id=tmp_path / f"r{rank}")
        save({"model": [whole("w", torch.ones(2))]}, checkpoint_id=tmp_path / "good")
        return messages

    first, second = run_ranks(fn, 2)
    assert first == second
    assert "rank 0, 1 failed in 'prepare'" in first[0] and "no rank holds 7 of its 9" in first[0]
    assert (
        "rank 1 failed in 'describe': CheckpointTypeError: part 'model': a shard is a NoneType"
        in first[1]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_a_write_error_on_one_rank_raises_on_all_and_keeps_the_old_checkpoint(
    tmp_path: Path,
) -> None:
    def fn(rank: int, world_size: int) -> str:
        tensor = torch.full((100_000,), 1.0)
        shard = box("w", tensor, (200_000,), (100_000 * rank,))
        save({"model": [shard]}, checkpoint_id=tmp_path / "checkpoint-1")
        tensor.fill_(2.0)
        if rank == 1:  # the kernel refuses writes beyond this size
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        with pytest.raises(SaveError) as caught:
            save({"model": [shard]}, checkpoint_id=tmp_path / "checkpoint-1")
        assert not isinstance(caught.value, ValueError)
        return str(caught.value)

    messages = run_ranks(fn, 2)
    assert messages[0] == messages[1]
    assert "rank 1 failed in 'write': OSError: [Errno 27] File too large" in str(messages[0])
    assert set(stored(tmp_path / "checkpoint-1")["w"].tolist()) == {1.0}
    assert verify_checkpoint(tmp_path / "checkpoint-1").problems == ()
    assert hidden(tmp_path) == []


CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def in_small_file_system(options: str, fn: Callable[[], str], folder: Path) -> str:
    """Call fn in a forked process that sees a new tmpfs at `folder`; needs no privileges."""

    def child(rank: int, world_size: int) -> str | None:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
            return None
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return None
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode()):
            return None
        return fn()

    (said,) = run_ranks(child, 1, init=False)
    if said is None:
        pytest.skip("this machine gives users no mount namespace")
    return str(said)


def fill_disk(folder: Path, numel: int, num_files: int) -> str:
    """Save one checkpoint, fail at the next one, look whether anything was lost, and go on."""

    def put(numel: int, step: int, num_files: int) -> None:
        files = {f"f{i}": b"" for i in range(num_files)}
        target = folder / f"checkpoint-{step}"
        save({"model": [whole("w", torch.ones(numel))]}, checkpoint_id=target, files=files)

    put(100_000, 1, 0)
    with pytest.raises(SaveError) as caught:
        put(numel, 2, num_files)
    assert os.listdir(folder) == ["checkpoint-1"]
    assert get_last_checkpoint(folder) == folder / "checkpoint-1"
    assert verify_checkpoint(folder / "checkpoint-1").problems == ()
    put(100_000, 2, 0)
    assert get_last_checkpoint(folder) == folder / "checkpoint-2"
    return str(caught.value)


def test_a_full_disk_is_one_clear_message_and_loses_nothing(tmp_path: Path) -> None:
    said = in_small_file_system("size=2m", lambda: fill_disk(tmp_path, 1_000_000, 0), tmp_path)
    assert "the checkpoint needs" in said and "nothing was written" in said


def test_a_disk_that_fills_up_while_writing_loses_nothing(tmp_path: Path) -> None:
    # The file system runs out of inodes, which no look at the free bytes foresees.
    options = "size=2m,nr_inodes=20"
    said = in_small_file_system(options, lambda: fill_disk(tmp_path, 10, 50), tmp_path)
    assert "rank 0 failed in 'write': OSError: [Errno 28] No space left on device" in said


def test_a_peer_that_does_not_come_ends_the_save_in_time(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> str:
        while rank == 1 and len(list(ended.iterdir())) < 2:
            time.sleep(0.01)
        with pytest.raises(SavePeerError) as caught:
            save({"model": []}, checkpoint_id=tmp_path / "run" / "c", timeout_s=1.0)
        (ended / str(rank)).touch()
        return str(caught.value)

    ended = tmp_path / "ended"
    ended.mkdir()
    message, _, _ = run_ranks(fn, 3, timeout_s=60)  # the others end before rank 1 comes
    assert "rank 0, save(" in message and "'describe'" in message and "limit 1 s" in message
    assert not any((tmp_path / "run").glob("*"))


def test_leftovers_of_a_killed_save_are_removed_by_the_next_one(tmp_path: Path) -> None:
    def dies(rank: int, world_size: int) -> None:
        save({"model": [whole("w", torch.ones(2))]}, checkpoint_id=tmp_path / "checkpoint-1")
        dist.barrier()
        pid = os.fork()
        if pid == 0:
            while not any(n.startswith(".checkpoint-2") for n in os.listdir(tmp_path)):
                pass
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        big = torch.ones(20_000_000)
        save({"model": [whole("w", big)]}, checkpoint_id=tmp_path / "checkpoint-2")

    collect_ranks(dies, 2, timeout_s=30)
    assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-2").exists()
    assert len(hidden(tmp_path)) == 1
    report = save({"model": [whole("w", torch.ones(2))]}, checkpoint_id=tmp_path / "checkpoint-3")
    assert len(report.removed_leftovers) == 1 and hidden(tmp_path) == []
    assert get_last_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.gpu
def test_device_tensors_are_saved_and_loaded_over_nccl(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        w = torch.randn(300, 70, device="cuda", dtype=torch.bfloat16)
        save({"model": [whole("w", w), whole("t", w.T)]}, checkpoint_id=tmp_path / "c", group=group)
        again = torch.zeros_like(w)
        load([whole("w", again)], checkpoint_id=tmp_path / "c")
        assert torch.equal(w, again)
        load([whole("t", again.T.zero_())], checkpoint_id=tmp_path / "c")
        assert torch.equal(w, again)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["unified_ckpt.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_no_file_takes_the_place_of_what_a_save_writes(name: str, tmp_path: Path) -> None:
    """Also where this save has none of that name: loads would read it."""
    state = {"model": {"w": torch.ones(2)}}
    for given in ("files", "rank_files"):
        with pytest.raises(ValueError, match=rf"{name}'.* (another|different) name"):
            save(state, checkpoint_id=tmp_path / "checkpoint-1", **{given: {name: b"{}"}})
    assert list(tmp_path.iterdir()) == []
