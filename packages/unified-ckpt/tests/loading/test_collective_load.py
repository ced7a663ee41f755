import os
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import Shard, load, load_files, read_index, save
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.geometry.tensors.memory import narrow_box
from unified_ckpt.loading import reader as reader_module
from unified_ckpt.options import LoadOptions, SaveOptions


def box(key: str, tensor: torch.Tensor, global_shape: tuple, offset: tuple) -> Shard:
    return Shard.of(key, tensor, global_shape=global_shape, offset=offset)


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return box(key, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def put(folder: Path, **tensors: torch.Tensor) -> Path:
    save({"model": [whole(k, t) for k, t in tensors.items()]}, checkpoint_id=folder / "c")
    return folder / "c"


def test_destinations_of_every_kind_are_filled_in_place(tmp_path: Path) -> None:
    w = torch.randn(6, 8)
    folder = put(tmp_path, w=w, z=torch.zeros(0, 3), s=torch.tensor(2.5), c=w[:, :2].clone())
    fused = torch.zeros(2, 12, 8)
    cases = {
        "plain": torch.zeros(6, 8),
        "transposed": torch.zeros(8, 6).T,
        "columns of a wider tensor": torch.zeros(6, 20)[:, 5:13],
        "rows of a fused tensor": fused[1, 6:],
        "stepped": torch.zeros(12, 16)[::2, ::2],
        "leaf": torch.zeros(6, 8, requires_grad=True),
    }
    for name, tensor in cases.items():
        load([whole("w", tensor)], checkpoint_id=folder)
        assert torch.equal(tensor.detach(), w), name
    assert fused[0].count_nonzero() == 0 and fused[1, :6].count_nonzero() == 0
    scalar, empty = torch.tensor(0.0), torch.ones(0, 3)
    report = load([whole("s", scalar), whole("z", empty)], checkpoint_id=folder)
    assert scalar.item() == 2.5 and report.num_bytes == 4


def test_a_conjugated_destination_receives_the_stored_values(tmp_path: Path) -> None:
    w = torch.randn(5, dtype=torch.complex64)
    destination = torch.zeros(5, dtype=torch.complex64).conj()
    load([whole("w", destination)], checkpoint_id=put(tmp_path, w=w))
    assert torch.equal(destination, w)


def test_autograd_notices_that_a_tensor_was_loaded(tmp_path: Path) -> None:
    folder = put(tmp_path, w=torch.ones(3))
    weight = torch.zeros(3)
    loss = (torch.ones(3, requires_grad=True) * weight).sum()
    load([whole("w", weight)], checkpoint_id=folder)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chunk", [1 << 24, 64])
def test_any_box_is_read_exactly_and_nothing_more(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of bytes below and above a page, and buffers smaller than a row."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    monkeypatch.setattr(reader_module, "_SPAN_BYTES", chunk)
    monkeypatch.setattr(reader_module, "_PAGE_BYTES", rng.choice([4, 4096]))
    shapes = [(7,), (9, 11), (3, 4, 5), (2, 3, 2, 5), (40, 3000)]
    tensors = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    folder = put(tmp_path, **tensors)
    for _ in range(60):
        wants, expected = [], []
        for key, tensor in rng.sample(list(tensors.items()), 3):
            offset = tuple(rng.randint(0, n) for n in tensor.shape)
            shape = tuple(rng.randint(0, n - o) for n, o in zip(tensor.shape, offset, strict=True))
            destination = torch.full(shape, -1.0)
            if rng.random() < 0.5 and len(shape) > 1:
                destination = torch.full(shape[::-1], -1.0).permute(*reversed(range(len(shape))))
            wants.append(box(key, destination, tuple(tensor.shape), offset))
            expected.append(narrow_box(tensor, offset, shape))
        report = load(wants, checkpoint_id=folder)
        for want, tensor in zip(wants, expected, strict=True):
            assert torch.equal(want.tensor, tensor), seed
        needed = sum(t.numel() * 4 for t in expected)
        assert report.num_bytes >= needed
        if reader_module._PAGE_BYTES == 4:
            assert report.num_bytes == needed, seed


def test_a_plain_transformers_directory_loads_with_and_without_index(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.arange(6)
    safetensors.torch.save_file({"a": a, "b": b}, tmp_path / "model.safetensors")
    out_a, out_b = torch.zeros(3, 2), torch.zeros_like(b)
    wants = [box("a", out_a, (3, 4), (0, 1)), whole("b", out_b)]
    report = load(wants, checkpoint_id=tmp_path)
    assert torch.equal(out_a, a[:, 1:3]) and torch.equal(out_b, b)
    assert report.verified_bytes == 0
    (tmp_path / "model.safetensors").unlink()
    for number, name in enumerate("ab"):
        safetensors.torch.save_file(
            {name: {"a": a, "b": b}[name]}, tmp_path / f"model-{number}.safetensors"
        )
    index = (
        '{"metadata": {}, "weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}'
    )
    (tmp_path / "model.safetensors.index.json").write_text(index)
    out_a.zero_(), out_b.zero_()
    load(wants, checkpoint_id=tmp_path)
    assert torch.equal(out_a, a[:, 1:3]) and torch.equal(out_b, b)
    stored = read_index(tmp_path)["a"]
    assert (stored.dtype, stored.shape, stored.file) == ("F32", (3, 4), "model-0.safetensors")


def test_missing_keys_raise_or_are_reported_and_left_alone(tmp_path: Path) -> None:
    folder = put(tmp_path, a=torch.ones(2))
    a, b = torch.zeros(2), torch.full((2,), 7.0)
    with pytest.raises(LoadError, match="part 'model' lacks 'b'; check the key names"):
        load([whole("a", a), whole("b", b)], checkpoint_id=folder)
    assert a.tolist() == [0, 0]
    report = load([whole("a", a), whole("b", b)], checkpoint_id=folder, strict=False)
    assert (a.tolist(), b.tolist()) == ([1, 1], [7, 7])
    assert (report.num_tensors, report.missing) == (1, ("b",))


def test_a_part_that_is_not_stored_raises_or_is_reported(tmp_path: Path) -> None:
    folder = put(tmp_path, w=torch.ones(2))
    w, other = torch.zeros(2), torch.full((2,), 7.0)
    state = {"model": [whole("w", w)], "extra": [whole("t", other)]}
    with pytest.raises(LoadError, match="no part 'extra'"):
        load(state, checkpoint_id=folder)
    assert w.sum() == 0
    assert load(state, checkpoint_id=folder, strict=False).missing == ("t",)
    assert (w.sum(), other.tolist()) == (2, [7, 7])
    with pytest.raises(LoadError, match="no part 'extra'"):  # nothing that was asked for is there
        load({"extra": state["extra"]}, checkpoint_id=folder, strict=False)


def test_another_dtype_raises_or_is_cast(tmp_path: Path) -> None:
    w = torch.randn(50)
    folder = put(tmp_path, w=w, i=torch.arange(3))
    half = torch.zeros(50, dtype=torch.bfloat16)
    with pytest.raises(LoadError, match=r"stored dtype is F32, .* has BF16.*cast=True"):
        load([whole("w", half)], checkpoint_id=folder)
    load([whole("w", half)], checkpoint_id=folder, cast=True)
    assert torch.equal(half, w.bfloat16())
    with pytest.raises(LoadError, match=r"stored shape is \(50,\), wanted a box of \(60,\)"):
        load([whole("w", torch.zeros(60))], checkpoint_id=folder)


def test_absent_directories_parts_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such checkpoint directory"):
        load([], checkpoint_id=tmp_path / "nothing")
    folder = put(tmp_path, w=torch.ones(1))
    with pytest.raises(LoadError, match=r"no part 'optimizer'.*it holds \['model'\]"):
        load([whole("w", torch.zeros(1))], checkpoint_id=folder, part="optimizer")
    with pytest.raises(LoadError, match=r"holds no file 'config.json'"):
        load_files(folder, "config.json")
    with pytest.raises(LoadError, match="leads outside"):
        load_files(folder, "../x")
    assert load([], checkpoint_id=folder).num_tensors == 0


def test_memory_shared_between_elements_is_no_destination(tmp_path: Path) -> None:
    folder = put(tmp_path, w=torch.ones(4, 3))
    with pytest.raises(ValueError, match="shares memory between elements"):
        load([whole("w", torch.zeros(3).expand(4, 3))], checkpoint_id=folder)


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def test_damage_is_found_while_loading_and_named(tmp_path: Path) -> None:
    folder = put(tmp_path, a=torch.randn(100), b=torch.randn(100))
    stored = read_index(folder)["b"]
    flip(folder / "model.safetensors", stored.begin + 17)
    destination = torch.zeros(100)
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors: 'b' is damaged: bytes"):
        load([whole("b", destination)], checkpoint_id=folder)
    load([whole("b", destination)], checkpoint_id=folder, verify=False)
    assert load([whole("a", destination)], checkpoint_id=folder).verified_bytes == 400


def test_a_damaged_header_index_or_manifest_is_found_before_reading(tmp_path: Path) -> None:
    tensors = [whole(f"w{i}", torch.ones(2)) for i in range(2)]
    for name, offset in {
        "model-00001-of-00002.safetensors": 30,
        "model.safetensors.index.json": 60,
        "manifest.json": 40,
    }.items():
        options = SaveOptions(max_shard_bytes=8)
        save({"model": tensors}, checkpoint_id=tmp_path / "c", options=options)
        flip(tmp_path / "c" / name, offset)
        with pytest.raises(CorruptCheckpointError, match=name):
            load(tensors, checkpoint_id=tmp_path / "c")
        os.rename(tmp_path / "c", tmp_path / f"damaged-{name}")


def test_files_that_are_cut_short_or_gone_are_named(tmp_path: Path) -> None:
    folder = put(tmp_path, w=torch.ones(1000))
    (folder / "manifest.json").unlink()
    path = folder / "model.safetensors"
    index = read_index(folder)
    raw = path.read_bytes()
    os.truncate(path, len(raw) - 10)
    with pytest.raises(CorruptCheckpointError, match="the tensors end at byte"):
        load([whole("w", torch.zeros(1000))], checkpoint_id=folder)
    path.unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "model.safetensors"}}'
    )
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors: file is missing"):
        load([whole("w", torch.zeros(1000))], checkpoint_id=folder)
    assert index["w"].end == len(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "malformed index"),
        ('{"weight_map": []}', "malformed index"),
        ('{"weight_map": {"w": 3}}', "malformed index"),
        ('{"weight_map": {"w": "../m"}}', "leads outside"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "leads outside"),
        ('{"weight_map": {"w": "other.safetensors"}}', "does not"),
    ],
)
def test_a_bad_index_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"v": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=message):
        load([whole("w", torch.zeros(1))], checkpoint_id=tmp_path)


def test_the_reader_ends_its_threads_when_it_fails(tmp_path: Path) -> None:
    folder = put(tmp_path, w=torch.randn(100_000))
    flip(folder / "model.safetensors", 100_000)
    before, during = set(threading.enumerate()), set()
    destination = whole("w", torch.zeros(100_000))
    submit = ThreadPoolExecutor.submit

    def seen(pool: ThreadPoolExecutor, *args: object) -> Future:
        future = submit(pool, *args)
        during.update(set(threading.enumerate()) - before)
        return future

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CorruptCheckpointError):
        patch.setattr(ThreadPoolExecutor, "submit", seen)
        load([destination], checkpoint_id=folder)
    assert during
    assert not [thread for thread in during if thread.is_alive()]


def test_stored_tensors_that_nothing_takes_are_in_the_report(tmp_path: Path) -> None:
    whole = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    save({"model": whole, "other": {"x": torch.ones(1)}}, checkpoint_id=tmp_path / "c")
    bare = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2))
    report = load({"model": bare}, checkpoint_id=tmp_path / "c")
    assert report.unused == ("0.bias",) and report.missing == ()
    assert torch.equal(bare[0].weight, whole[0].weight)
    wrapped = {f"module.{name}": tensor for name, tensor in whole.state_dict().items()}
    assert load({"model": wrapped}, checkpoint_id=tmp_path / "c").unused == ()
    ignoring = LoadOptions(ignored_keys=("0.bias",))
    assert load({"model": bare}, checkpoint_id=tmp_path / "c", options=ignoring).unused == ()


def test_a_rank_of_several_does_not_call_the_tensors_of_others_unused(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(3)}}, checkpoint_id=tmp_path / "c")

    def fn(rank: int, world_size: int) -> tuple[str, ...]:
        mine = {"ab"[rank]: torch.zeros(2 + rank)}
        return load({"model": mine}, checkpoint_id=tmp_path / "c").unused

    assert run_ranks(fn, 2) == [(), ()]


def test_ranks_that_load_together_know_what_none_of_them_took(tmp_path: Path) -> None:
    stored = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1), "d": torch.ones(1)}
    save({"model": stored, "other": {"x": torch.ones(1)}}, checkpoint_id=tmp_path / "c")

    def fn(rank: int, world_size: int) -> list[tuple[str, ...]]:
        options = LoadOptions(group=dist.group.WORLD, ignored_keys=("d",) if rank else ())
        mine: dict = {"model": {"ab"[rank]: torch.zeros(2 + rank)}}
        place = tmp_path / "c"
        here = load(mine, checkpoint_id=place, options=options).unused
        if rank:
            mine |= {"other": {}}
        said = load(mine, checkpoint_id=place, strict=False, options=options).unused
        shards = [Shard.of("a", torch.zeros(2), global_shape=(2,), offset=(0,))]
        return [here, said, load(shards, checkpoint_id=place, options=options).unused]

    first, second = run_ranks(fn, 2)
    assert first == [("c",), ("c",), ()] and second == [("c",), ("c", "x"), ()]


def test_an_unknown_depth_of_verification_is_refused(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "checkpoint-1")
    state = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(ValueError, match="verify='full'; expected True, False or 'touched'"):
        load(state, checkpoint_id=tmp_path / "checkpoint-1", verify="full")
    assert not state["model"]["w"].any()
