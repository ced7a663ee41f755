"""torch's own dcp.save and dcp.load are the oracle of both directions."""

import collections
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # once here, not in each rank
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranktest import collect_ranks, run_ranks
from ranktest.memory import growth_bytes
from unified_ckpt import load, read_index, save, verify_checkpoint
from unified_ckpt.cli import main
from unified_ckpt.dcp.converting import from_dcp, to_dcp
from unified_ckpt.dcp.reader import UnifiedStorageReader
from unified_ckpt.errors import (
    CheckpointTypeError,
    CheckpointValueError,
    CorruptCheckpointError,
    LoadError,
)
from unified_ckpt.geometry.tensors.dtypes import _BY_TORCH
from unified_ckpt.options import SaveOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
VALUES: dict[str, Any] = {
    "step": 7,
    "none": None,
    "raw": b"\x00\xff",
    "text": "ä",
    "rate": 0.1,
    "betas": (0.9, 0.95),
    "ids": {1, 2},
    "by_number": {"3": [1, {"a": None}]},
    "dtype": torch.bfloat16,
    "shape": torch.Size([2, 3]),
    "inf": float("inf"),
    "scalar": np.float32(1.5),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def every_dtype() -> dict[str, torch.Tensor]:
    found = {}
    for dtype in _BY_TORCH:
        name = str(dtype).removeprefix("torch.")
        found[name] = random_tensor(dtype, 5, 6)
        found[f"{name}.empty"] = random_tensor(dtype, 0, 6)
        if dtype != torch.float4_e2m1fn_x2:  # a packed one has a dim, in safetensors
            found[f"{name}.scalar"] = random_tensor(dtype, 1).view(())
    return found


def whole(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """What torch makes of a DCP checkpoint that it reads without a template."""
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    found: dict[str, Any] = torch.load(tmp_path / "whole.pt", weights_only=False)
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and (a == b).all())
    return type(a) is type(b) and bool(a == b)


def test_every_dtype_and_value_goes_there_and_back_to_the_bit(tmp_path: Path) -> None:
    state = {"model": every_dtype(), "optimizer": {"state": {"w": {"exp_avg": torch.ones(3)}}}}
    dcp.save({**state, **VALUES}, checkpoint_id=tmp_path / "a")
    done = from_dcp(tmp_path / "a", tmp_path / "b")
    assert (done.num_tensors, done.left) == (len(every_dtype()) + 1, ())
    assert verify_checkpoint(tmp_path / "b").problems == ()
    assert set(read_index(tmp_path / "b")) == set(state["model"])
    mine = {"model": {key: torch.empty_like(t) for key, t in state["model"].items()}}
    load(mine, checkpoint_id=tmp_path / "b")
    assert same(mine["model"], state["model"])
    assert to_dcp(tmp_path / "b", tmp_path / "c").left == ()
    assert same(whole(tmp_path / "a", tmp_path), whole(tmp_path / "c", tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "whole.pt"]


def test_what_ranks_held_parts_of_comes_out_whole(tmp_path: Path) -> None:
    weight = torch.arange(35.0).view(7, 5)

    def saves(rank: int, world_size: int) -> dict[str, list[float]]:
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3, 5)).square().sum().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        more = {
            "rows": distribute_tensor(weight, mesh, [Shard(0)]),
            "columns": distribute_tensor(weight.bfloat16(), mesh, [Shard(1)]),
            "one": distribute_tensor(weight[:1], mesh, [Shard(0)]),  # nothing on the second rank
            "same": distribute_tensor(weight[0], mesh, [Replicate()]),
        }
        state = {"model": weights, "optimizer": moments, "more": more, "step": 3}
        dcp.save(state, checkpoint_id=tmp_path / "a")
        return {key: value.full_tensor().flatten().tolist() for key, value in weights.items()}

    expected = run_ranks(saves, 2)[0]
    from_dcp(tmp_path / "a", tmp_path / "b")
    wanted = {"model": {key: torch.zeros(len(value)) for key, value in expected.items()}}
    for key, stored in read_index(tmp_path / "b").items():
        if key in expected:
            assert stored.shape is not None
            wanted["model"][key] = torch.zeros(stored.shape)
    load(wanted, checkpoint_id=tmp_path / "b")
    assert {key: t.flatten().tolist() for key, t in wanted["model"].items()} == expected
    boxes = {
        "model": {
            "more.rows": weight * 0,
            "more.columns": weight.bfloat16() * 0,
            "more.one": weight[:1] * 0,
            "more.same": weight[0] * 0,
        }
    }
    load(boxes, checkpoint_id=tmp_path / "b")
    assert torch.equal(boxes["model"]["more.rows"], weight)
    assert torch.equal(boxes["model"]["more.columns"], weight.bfloat16())
    assert torch.equal(boxes["model"]["more.one"], weight[:1])
    to_dcp(tmp_path / "b", tmp_path / "c", most_bytes=40)  # chunks of a few elements
    assert len([*(tmp_path / "c").glob("*.distcp")]) > 3
    assert same(whole(tmp_path / "a", tmp_path), whole(tmp_path / "c", tmp_path))


def test_memory_is_that_of_one_chunk_not_of_the_checkpoint(tmp_path: Path) -> None:
    mib = 1024 * 1024
    state = {f"w{n}": torch.full((1, mib), n, dtype=torch.uint8) for n in range(96)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "a")
    dcp.save({"model": {"w": torch.ones(1)}}, checkpoint_id=tmp_path / "small")
    del state

    def forth(rank: int, world_size: int) -> int:
        from_dcp(tmp_path / "small", tmp_path / "d")  # what is imported is no chunk
        return growth_bytes(lambda: from_dcp(tmp_path / "a", tmp_path / "b"))

    def back(rank: int, world_size: int) -> int:
        return growth_bytes(lambda: to_dcp(tmp_path / "b", tmp_path / "c", most_bytes=8 * mib))

    for way in (forth, back):  # what is being written and summed is 16 MiB and some
        (grown_bytes,) = run_ranks(way, 1)
        assert grown_bytes < 64 * mib, grown_bytes


class Stranger:
    """What no checkpoint holds."""


def test_pickles_name_plain_values_only_unless_they_are_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"w": torch.ones(2)}, "last": collections.deque([1, 2], maxlen=3)}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    given = ["from-dcp", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "'last' is no plain value" in said and "collections.deque" in said
    assert "--trust-pickles" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert main([*given, "--trust-pickles"]) == 0
    back = {"last": None}
    dcp.load(back, storage_reader=UnifiedStorageReader(tmp_path / "b"))
    assert back["last"] == state["last"]
    dcp.save({**state, "who": Stranger()}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointTypeError, match="who: a Stranger is neither a tensor nor"):
        from_dcp(tmp_path / "c", tmp_path / "d", trusted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_metadata_that_would_run_code_is_refused_before_it_does(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "a").mkdir()
    raw = pickle.dumps(Metadata({}, planner_data=Evil(), storage_data={}))
    (tmp_path / "a" / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointTypeError, match=r"names (posix|os).mkdir.*--trust-pickles"):
        from_dcp(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["nothing", "file", "empty", "alone", "broken", "other"])
def test_what_is_no_dcp_checkpoint_is_one_line_and_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("empty", "alone", "broken", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "alone" / "__0.metadata").write_bytes(b"")
    (tmp_path / "broken" / ".metadata").write_bytes(b"\x80\x04nonsense")
    (tmp_path / "other" / ".metadata").write_bytes(pickle.dumps([1]))
    assert main(["from-dcp", str(tmp_path / name), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"unified-ckpt: {tmp_path / name}") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_not_empty_is_refused_either_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "a")
    (tmp_path / "b").mkdir()  # an empty one is written to
    from_dcp(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").mkdir()
    to_dcp(tmp_path / "b", tmp_path / "c")
    for command, source in (("from-dcp", "a"), ("to-dcp", "b")):
        for target in ("a", "b"):
            assert main([command, str(tmp_path / source), str(tmp_path / target)]) == 2
            assert "is not an empty directory" in capsys.readouterr().err
    assert verify_checkpoint(tmp_path / "b").problems == ()
    assert main(["to-dcp", str(tmp_path / "b"), "s3://bucket/c"]) == 2
    assert "works on directories only" in capsys.readouterr().err


def test_names_that_fall_together_are_named_and_a_prefix_keeps_them_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"w": torch.ones(1)}, "w": torch.zeros(1), "v": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    given = ["from-dcp", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(given) == 2
    assert "'model.w' and 'w' are 'w' of part 'model'" in capsys.readouterr().err
    assert main([*given, "--prefix", "model.=net"]) == 0
    assert set(read_index(tmp_path / "b")) == {"w", "v"}
    assert set(read_index(tmp_path / "b", "net")) == {"w"}
    for wrong in ("model", "model.=", "x.=../up", "a=b", "="):
        assert main([*given[:2], str(tmp_path / "c"), "--prefix", wrong, "--prefix", "a=b"]) == 2
        assert "prefix" in capsys.readouterr().err
    assert main(["to-dcp", str(tmp_path / "b"), str(tmp_path / "c"), "--prefix", "=model"]) == 2
    assert "so no prefix can be given" in capsys.readouterr().err


def test_what_save_wrote_has_its_parts_and_paths_as_names_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"w": torch.randn(6, 4)}, "critic": {"v": torch.ones(3)}, "step": {"n": 5}}
    save(state, checkpoint_id=tmp_path / "a", files={"config.json": b"{}"})
    assert main(["to-dcp", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "left out: file config.json" in capsys.readouterr().out
    back = {"model": {"w": torch.zeros(6, 4)}, "critic": {"v": torch.zeros(3)}, "step": {"n": 0}}
    dcp.load(back, checkpoint_id=tmp_path / "b")
    assert same(back, state)
    given = ["to-dcp", str(tmp_path / "a"), str(tmp_path / "c"), "--prefix"]
    assert main([*given, "=model"]) == 0
    flat = {"w": torch.zeros(6, 4)}
    dcp.load(flat, checkpoint_id=tmp_path / "c")
    assert torch.equal(flat["w"], state["model"]["w"])
    assert main([*given[:2], str(tmp_path / "d"), "--prefix", "critic.=model"]) == 2
    assert "no prefix is left for part 'critic'" in capsys.readouterr().err


def test_names_that_are_tied_are_told(tmp_path: Path) -> None:
    weight = torch.ones(2)
    state = {"model": {"embed": weight, "head": weight}}
    save(state, checkpoint_id=tmp_path / "a", options=SaveOptions(tied={"head": "embed"}))
    assert to_dcp(tmp_path / "a", tmp_path / "b").left == ("name 'head', which is tied to 'embed'",)


def test_a_name_of_two_tensors_or_of_a_tensor_and_a_value_is_refused(tmp_path: Path) -> None:
    state = {"model": {"ema.w": torch.ones(1), "n": torch.ones(1)}, "ema": {"w": torch.zeros(1)}}
    save(state, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointValueError, match=r"'ema.w' is a tensor of part"):
        to_dcp(tmp_path / "a", tmp_path / "b", prefixes={"": "model"})
    save({"model": {"n.k": torch.ones(1)}, "n": {"k": 3}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointValueError, match=r"'n.k' is a tensor and a value"):
        to_dcp(tmp_path / "c", tmp_path / "b", prefixes={"": "model"})
    assert not (tmp_path / "b").exists()


def test_what_the_metadata_has_beside_names_is_told(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = "of another planner"
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 1)}}
    path.write_bytes(pickle.dumps(metadata))
    (tmp_path / "a" / "common.pt").write_bytes(b"x")
    assert from_dcp(tmp_path / "a", tmp_path / "b").left == (
        "planner_data, a str that no names and paths stand in",
        "mcore_data of the metadata",
        "file common.pt",
    )


def test_what_cannot_be_stored_or_read_is_named(tmp_path: Path) -> None:
    dcp.save({"model": {"z": torch.ones(2, dtype=torch.complex128)}}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointTypeError, match=r"'model.z': safetensors cannot hold .*128"):
        from_dcp(tmp_path / "a", tmp_path / "out")
    dcp.save({"model": {"w": torch.ones(999)}}, checkpoint_id=tmp_path / "b")
    (data,) = (tmp_path / "b").glob("*.distcp")
    raw = data.read_bytes()
    data.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptCheckpointError, match=r"'model.w': cannot be read"):
        from_dcp(tmp_path / "b", tmp_path / "out")
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"'model.w': .*distcp"):
        from_dcp(tmp_path / "b", tmp_path / "out")
    target = save({"model": {"w": torch.ones(999)}}, checkpoint_id=tmp_path / "c").path
    raw = bytearray((target / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (target / "model.safetensors").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="'w' is damaged"):
        to_dcp(target, tmp_path / "out", most_bytes=100)
    with pytest.raises(LoadError, match="holds neither tensors nor values"):
        to_dcp(tmp_path / "b", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("command", ["from-dcp", "to-dcp"])
def test_a_conversion_that_is_killed_leaves_nothing_that_looks_complete(
    command: str, tmp_path: Path
) -> None:
    state = {"model": {f"w{n}": torch.full((50,), float(n)) for n in range(200)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "ours")
    work = from_dcp if command == "from-dcp" else to_dcp
    source = tmp_path / ("dcp" if command == "from-dcp" else "ours")

    def dies(rank: int, world_size: int) -> None:
        more = {} if command == "from-dcp" else {"most_bytes": 1000}
        killer = threading.Thread(target=_kill_when_written, args=(tmp_path,), daemon=True)
        killer.start()
        work(source, tmp_path / "out", **more)

    (outcome,) = collect_ranks(dies, 1)
    assert not outcome.ok
    assert not (tmp_path / "out").exists() and len(_hidden(tmp_path)) == 1
    work(source, tmp_path / "out")  # takes the leftover away
    assert _hidden(tmp_path) == []
    kept = tmp_path / "out" if command == "from-dcp" else tmp_path / "ours"
    assert verify_checkpoint(kept).problems == ()


def _hidden(folder: Path) -> list[Path]:
    return [*folder.glob(".*.unified-ckpt-tmp-*")]


def _kill_when_written(folder: Path) -> None:
    while not any(path.stat().st_size for each in _hidden(folder) for path in each.iterdir()):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)
