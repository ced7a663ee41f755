import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ranktest import run_ranks
from ranktest.memory import growth_bytes
from unified_ckpt import Shard, load, read_index, save, verify_checkpoint
from unified_ckpt.cli import main
from unified_ckpt.errors import CorruptCheckpointError, KeptFilesWarning, LoadError
from unified_ckpt.files.format.header import HeaderEntry, encode_header
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.geometry.layouts.layouts import ParallelDegrees, rank_box
from unified_ckpt.geometry.regions import box_region
from unified_ckpt.geometry.tensors.dtypes import dtype_of
from unified_ckpt.options import SaveOptions
from unified_ckpt.tools.diff import diff_checkpoints
from unified_ckpt.tools.rewrite import export_model, reshard, rule_by_name

LAYER = "model.layers.0."


def whole(key: str, tensor: torch.Tensor) -> Shard:
    return Shard.of(key, tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def model() -> dict[str, torch.Tensor]:
    tensors = {
        f"{LAYER}self_attn.q_proj.weight": torch.randn(8, 6),
        f"{LAYER}self_attn.o_proj.weight": torch.randn(6, 8).bfloat16(),
        f"{LAYER}mlp.gate.weight": torch.randn(5, 6),
        f"{LAYER}norm.weight": torch.randn(6),
        "model.embed_tokens.weight": torch.randn(11, 6),
        "step": torch.tensor(3),
    }
    for number in range(5):
        for name, shape in (("up_proj", (4, 6)), ("down_proj", (6, 4))):
            tensors[f"{LAYER}mlp.experts.{number}.{name}.weight"] = torch.randn(shape)
    return tensors


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    moments = {
        f"{key}/moment1": t.float() * 2 for key, t in tensors.items() if t.is_floating_point()
    }
    return save(
        {
            "model": [whole(key, t) for key, t in tensors.items()],
            "optimizer": [whole(key, t) for key, t in moments.items()],
        },
        checkpoint_id=folder,
        files={"config.json": b"{}", "trainer_state.json": b"[1]"},
    ).path


def test_rules_follow_the_names_that_transformers_gives() -> None:
    def rule(key: str, *shape: int) -> tuple[bool, int | None]:
        found = rule_by_name(key, shape)
        return found.expert, found.tp_dim

    assert rule(f"{LAYER}self_attn.k_proj.weight", 4, 6) == (False, 0)
    assert rule(f"{LAYER}self_attn.k_proj.bias", 4) == (False, 0)
    assert rule(f"{LAYER}self_attn.o_proj.weight/moment1", 4, 6) == (False, 1)
    assert rule(f"{LAYER}self_attn.o_proj.bias", 4) == (False, None)
    assert rule(f"{LAYER}mlp.experts.3.down_proj.weight", 4, 6) == (True, 1)
    assert rule(f"{LAYER}mlp.experts.gate_up_proj", 4, 6, 8) == (True, None)
    assert rule(f"{LAYER}input_layernorm.weight", 4) == (False, None)


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2, "ep": 3, "etp": 2}, {"ep": 4}, {"tp": 3}])
def test_a_resharded_checkpoint_holds_the_same_and_loads_in_any_layout(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    tensors = model()
    source = put(tmp_path / "a", tensors)
    degrees = ParallelDegrees(world_size=12, **sizes)
    target = reshard(source, tmp_path / "b", degrees)
    assert verify_checkpoint(target).problems == ()
    assert [str(d) for d in diff_checkpoints(source, target)] == []
    key = f"{LAYER}self_attn.o_proj.weight"
    columns = torch.zeros(6, 3, dtype=torch.bfloat16)
    load([Shard.of(key, columns, global_shape=(6, 8), offset=(0, 3))], checkpoint_id=target)
    assert torch.equal(columns, tensors[key][:, 3:6])


def test_every_box_of_a_rank_is_one_range_of_a_file(tmp_path: Path) -> None:
    tensors = model()
    degrees = ParallelDegrees(world_size=6, tp=2, ep=3, etp=2)
    target = reshard(put(tmp_path / "a", tensors), tmp_path / "b", degrees)
    index = read_index(target)
    for key, tensor in tensors.items():
        rule = rule_by_name(key, tuple(tensor.shape))
        if rule.tp_dim == 1:
            boxes = [stored for name, stored in index.items() if name.startswith(f"{key}@")]
            assert len(boxes) == 2 and key not in index
        elif not rule.expert:
            stored = index[key]
            for rank in range(6):
                box = rank_box(rule, tuple(tensor.shape), rank=rank, degrees=degrees)
                size = dtype_of(stored.dtype).itemsize_bytes
                region = box_region(
                    box.global_shape,
                    box.offset,
                    box.local_shape,
                    itemsize_bytes=size,
                    start=stored.begin,
                )
                assert region.contiguous, key
    files = {
        k.split("experts.")[1].split(".")[0]: s.file for k, s in index.items() if "experts" in k
    }
    assert files["0"] == files["1"] != files["2"] == files["3"] != files["4"]


def test_an_export_is_what_transformers_reads_and_nothing_else(tmp_path: Path) -> None:
    tensors = model()
    split = reshard(
        put(tmp_path / "a", tensors), tmp_path / "b", ParallelDegrees(world_size=2, tp=2)
    )
    target = export_model(split, tmp_path / "c")
    loaded = safetensors.torch.load_file(target / "model.safetensors")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    assert not (target / "trainer_state.json").exists() and not list(target.glob("optim*"))
    with pytest.raises(LoadError, match="no part 'model'"):
        empty = save({"optimizer": []}, checkpoint_id=tmp_path / "o").path
        export_model(empty, tmp_path / "d")


def test_an_average_becomes_the_weights_and_what_it_lacks_comes_from_them(tmp_path: Path) -> None:
    tensors = {key: tensor.bfloat16() for key, tensor in model().items()}
    frozen, *averaged = sorted(tensors)
    ema = {key: torch.randn(tensors[key].shape) for key in averaged}
    parts = {"model": tensors, "ema": ema, "optimizer": {"w/exp_avg": torch.zeros(2)}}
    state = {name: [whole(k, t) for k, t in part.items()] for name, part in parts.items()}
    source = save(state, checkpoint_id=tmp_path / "a").path
    target = export_model(source, tmp_path / "b", part="ema")
    loaded = safetensors.torch.load_file(target / "model.safetensors")
    expected = {frozen: tensors[frozen], **ema}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert all(loaded[key].dtype == expected[key].dtype for key in expected)
    with pytest.raises(LoadError, match="no part 'ma'"):
        export_model(source, tmp_path / "c", part="ma")
    with pytest.raises(
        ValueError, match="'w/exp_avg' is no tensor of the model; export model, ema"
    ):
        export_model(source, tmp_path / "c", part="optimizer")
    assert not (tmp_path / "c").exists()


def test_files_that_belong_to_no_part_are_copied_and_compared_whatever_their_name(
    tmp_path: Path,
) -> None:
    files = {"rng/rank-0.safetensors": b"r", "lora.fp16.safetensors": b"l", "a-b.json": b"{}"}
    state = {"model": [whole("w", torch.randn(4, 6)), whole("v", torch.randn(4, 6))]}
    source = save(state, checkpoint_id=tmp_path / "a", files=files).path
    (source / "model-00001-of-00002.safetensors").write_bytes(b"stale")  # of another save
    target = reshard(source, tmp_path / "b", ParallelDegrees(world_size=2, tp=2))
    assert {name: (target / name).read_bytes() for name in files} == files
    assert verify_checkpoint(target).problems == ()
    assert [str(d) for d in diff_checkpoints(source, target)] == []
    (source / "rng" / "rank-0.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-0.safetensors: file is missing"):
        reshard(source, tmp_path / "c", ParallelDegrees(world_size=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_link_as_the_target_keeps_being_one_and_what_it_names_is_replaced(
    tmp_path: Path,
) -> None:
    source = put(tmp_path / "a", model())
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for _ in range(2):  # the link names nothing, then a checkpoint
        export_model(source, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert verify_checkpoint(tmp_path / "b").problems == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "link"]


def test_damage_stops_the_writing_and_leaves_nothing(tmp_path: Path) -> None:
    source = put(tmp_path / "a", model())
    stored = read_index(source)["model.embed_tokens.weight"]
    raw = bytearray((source / stored.file).read_bytes())
    raw[stored.begin + 5] ^= 4
    (source / stored.file).write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="embed_tokens"):
        reshard(source, tmp_path / "b", ParallelDegrees(world_size=2, tp=2))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_memory_stays_bounded_for_a_large_tensor(tmp_path: Path) -> None:
    entry = HeaderEntry(key=f"{LAYER}self_attn.o_proj.weight", dtype="F32", shape=(4096, 16 * 1024))
    header, (placed,) = encode_header([entry])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(header)
    os.truncate(tmp_path / "a" / "model.safetensors", placed.end)  # 256 MiB of nothing

    def fn(rank: int, world_size: int) -> int:
        degrees = ParallelDegrees(world_size=2, tp=2)
        return growth_bytes(lambda: reshard(tmp_path / "a", tmp_path / "b", degrees))

    (grown_bytes,) = run_ranks(fn, 1)
    assert grown_bytes < 160 << 20, grown_bytes


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_stores_are_read_from_and_written_to_under_every_layout(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = f"file://{tmp_path}/store" if kind == "file" else request.getfixturevalue("bucket")
    tensors = model()
    source = put(tmp_path / "a", tensors)
    layouts = [{"tp": 2, "ep": 3, "etp": 2}, {"ep": 4}, {"tp": 3}]
    for number, sizes in enumerate(layouts[:1] if kind == "s3" else layouts):
        degrees = ParallelDegrees(world_size=12, **sizes)
        there = f"{root}/run/checkpoint-{number}"
        assert str(reshard(source, there, degrees)) == there
        assert verify_checkpoint(there).problems == ()
        assert [str(d) for d in diff_checkpoints(source, there)] == []
    back = reshard(there, tmp_path / "back", ParallelDegrees(world_size=2, tp=2))
    assert verify_checkpoint(back).problems == ()
    assert [str(d) for d in diff_checkpoints(there, back)] == []
    assert main(["export", there, f"{root}/model"]) == 0
    assert main(["reshard", f"{root}/model", "--to", "tp=2", f"{root}/model"]) == 0  # in its place
    assert main(["export", f"{root}/model", str(tmp_path / "model")]) == 0
    exported = read_index(tmp_path / "model")
    assert sorted(exported) == sorted(tensors)
    wanted = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    load({"model": wanted}, checkpoint_id=f"{root}/model")
    assert all(torch.equal(wanted[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_damage_of_the_source_leaves_no_checkpoint_in_a_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = f"file://{tmp_path}/store" if kind == "file" else request.getfixturevalue("bucket")
    source = put(tmp_path / "a", model())
    stored = read_index(source)["model.embed_tokens.weight"]
    raw = bytearray((source / stored.file).read_bytes())
    raw[stored.begin + 5] ^= 4
    (source / stored.file).write_bytes(raw)
    target = as_target("target", f"{root}/b")
    assert isinstance(target, Location)
    with pytest.raises(CorruptCheckpointError, match="embed_tokens"):
        reshard(source, target, ParallelDegrees(world_size=2, tp=2))
    assert target.store.keys(target.key) == []


def test_weights_alone_do_not_take_the_place_of_their_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    state = {"model": {"w": torch.ones(4)}, "optimizer": {"w/moment1": torch.ones(4)}}
    save(state, checkpoint_id=place)
    (tmp_path / "link").symlink_to(place)
    for target in (place, tmp_path / "link", f"file://{place}"):
        with pytest.raises(ValueError, match=r"is the source, whose optimizer .* would be gone"):
            export_model(place, target)
    assert (place / "optimizer.safetensors").exists()


def test_weights_that_only_the_master_weights_have_are_exported_from_them(tmp_path: Path) -> None:
    masters = {"w": torch.randn(4, 3), "b": torch.randn(4)}
    low = {key: tensor.bfloat16() for key, tensor in masters.items()}
    state = {"model": {**low, "frozen": torch.randn(2)}, "master_weights": masters}
    state["ema"] = {"w": torch.randn(4, 3)}
    options = SaveOptions(skip_save_model_weight=True)
    save(state, checkpoint_id=tmp_path / "run", options=options)
    for part, w in (("model", "master_weights"), ("master_weights", "master_weights")):
        assert_exported(tmp_path, part, {**state["model"], **masters, "w": state[w]["w"]})
    assert_exported(tmp_path, "ema", {**state["model"], **masters, "w": state["ema"]["w"]})
    save(state, checkpoint_id=tmp_path / "run")
    assert_exported(tmp_path, "model", state["model"])


def assert_exported(folder: Path, part: str, wanted: dict[str, torch.Tensor]) -> None:
    export_model(folder / "run", folder / "weights", part=part)
    found = safetensors.torch.load_file(folder / "weights" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted), part
    assert all(found[key].dtype == wanted[key].dtype for key in wanted), part


def test_a_checkpoint_with_files_of_others_is_resharded_in_its_own_place(tmp_path: Path) -> None:
    tensors = model()
    run = put(tmp_path / "run", tensors)
    (run / "notes.txt").write_text("mine")
    with pytest.warns(KeptFilesWarning, match="keeps the files"):
        reshard(run, run, ParallelDegrees(world_size=2, tp=2))
    assert (run / "notes.txt").read_text() == "mine" and (run / "config.json").exists()
    again = {"model": {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}}
    load(again, checkpoint_id=run)
    assert all(torch.equal(again["model"][key], tensors[key]) for key in tensors)
