import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from unified_ckpt import Shard, load, save
from unified_ckpt.dcp.reader import UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter
from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.options import SaveOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_dcp_reads_a_plain_transformers_directory(tmp_path: Path) -> None:
    w = torch.randn(3, 4)
    save_file({"lm_head.weight": w}, tmp_path / "model.safetensors")
    nested = {"model": {"lm_head.weight": w * 0}}
    dcp.load(nested, storage_reader=UnifiedStorageReader(tmp_path))
    assert torch.equal(nested["model"]["lm_head.weight"], w)
    flat = {"lm_head.weight": w * 0}
    dcp.load(flat, storage_reader=UnifiedStorageReader(tmp_path, prefixes={"": "model"}))
    assert torch.equal(flat["lm_head.weight"], w)


def test_dcp_reads_boxes_kept_sharded_and_compressed_moments(tmp_path: Path) -> None:
    m = torch.randn(4, 64)
    halves = [
        Shard.of("w/moment1", m[2 * i : 2 * i + 2], global_shape=(4, 64), offset=(2 * i, 0))
        for i in range(2)
    ]
    for number, options in enumerate(
        [SaveOptions(ignore_merge_optimizer=True), SaveOptions(moment_compression="int8")]
    ):
        save({"optimizer": halves}, checkpoint_id=tmp_path / str(number), options=options)
        back = {"optimizer": {"w/moment1": m * 0}}
        dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / str(number)))
        error = (back["optimizer"]["w/moment1"] - m).abs().max()
        assert error == 0 if number == 0 else 0 < error <= m.abs().max() / 254 * 1.001


def test_values_are_found_whichever_way_they_were_saved(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "step": 3,
        "sched": {"last": [1, (2,)], "deep": {"n": 4}},
    }
    save(state, checkpoint_id=tmp_path / "save")
    dcp.save(state, storage_writer=UnifiedStorageWriter(tmp_path / "dcp"))
    for name in ("save", "dcp"):
        empty = {"last": [0, (0,)], "deep": {"n": 0}}
        back = {"model": {"w": torch.zeros(2)}, "step": 0, "sched": copy.deepcopy(empty)}
        dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / name))
        assert (back["step"], back["sched"], back["model"]["w"].sum()) == (3, state["sched"], 2)
        back = {"model": {"w": torch.zeros(2)}, "step": 0, "sched": empty}
        load(back, checkpoint_id=tmp_path / name)
        assert (back["step"], back["sched"], back["model"]["w"].sum()) == (3, state["sched"], 2)


def test_metadata_tells_where_a_name_stood_in_the_nested_state(tmp_path: Path) -> None:
    held = {"model": {"a.b": torch.arange(3)}, "extra": {"n": [1, {"k": "v"}]}}
    dcp.save(held, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    metadata = UnifiedStorageReader(tmp_path / "c").read_metadata()
    assert metadata.planner_data["model.a.b"] == ("model", "a.b")
    assert metadata.state_dict_metadata["model.a.b"].size == (3,)


def test_another_dtype_raises_with_the_key_or_is_cast(tmp_path: Path) -> None:
    w = torch.randn(5)
    dcp.save({"model": {"w": w}}, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    half = {"model": {"w": w.bfloat16() * 0}}
    with pytest.raises(CheckpointException, match=r"'w' in model.safetensors: stored dtype is F32"):
        dcp.load(half, storage_reader=UnifiedStorageReader(tmp_path / "c"))
    dcp.load(half, storage_reader=UnifiedStorageReader(tmp_path / "c", cast=True))
    assert torch.equal(half["model"]["w"], w.bfloat16())


def test_damage_is_found_by_dcp_loads(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(500)}}, storage_writer=UnifiedStorageWriter(tmp_path / "c"))
    path = tmp_path / "c" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckpointException, match="'w' is damaged"):
        dcp.load(
            {"model": {"w": torch.zeros(500)}}, storage_reader=UnifiedStorageReader(tmp_path / "c")
        )
    (tmp_path / "c" / "dcp.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"dcp.json"):
        UnifiedStorageReader(tmp_path / "c").read_metadata()
