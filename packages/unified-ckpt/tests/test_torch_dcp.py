"""What torch's tests of DCP do with its own readers and writers, done with ours as well.

Written after `test/distributed/checkpoint` of torch: test_file_system_checkpoint_cpu, test_planner,
test_dtensor_resharding, test_tp_checkpoint, test_hsdp_checkpoint, test_fsdp_optim_state,
test_hf_storage, e2e/test_fsdp_ep, e2e/test_pipeline. All pass with torch's own pair too; torch's
tests themselves run with both pairs in `benchmarks/unified_ckpt_torch_dcp.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ranktest import run_ranks
from unified_ckpt.dcp.reader import UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OURS = (UnifiedStorageWriter, UnifiedStorageReader)


class Both(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def stepped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def check_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            check_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(whole(a), whole(b))
    else:
        assert a == b


def plain_tensors_and_bytes(writer: Any, reader: Any, path: Path) -> None:
    state = {
        "model": Both().state_dict(),
        "extra": {"text": "x", "list": [1, 2.5], "none": None, "t": torch.arange(3)},
        "empty": torch.zeros(0, 3),
    }
    dcp.save(state, storage_writer=writer(path))
    back = {
        "model": zeros_like(state["model"]),
        "extra": {"text": "", "list": [], "none": 1, "t": torch.zeros(3, dtype=torch.int64)},
        "empty": torch.ones(0, 3),
    }
    dcp.load(back, storage_reader=reader(path))
    check_equal(back, state)


def a_part_of_what_is_stored(writer: Any, reader: Any, path: Path) -> None:
    dcp.save({"a": torch.ones(4), "b": {"c": torch.arange(3), "n": 7}}, storage_writer=writer(path))
    back = {"b": {"c": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(back, storage_reader=reader(path))
    assert back["b"]["c"].tolist() == [0, 1, 2]


def a_key_that_is_not_stored(writer: Any, reader: Any, path: Path) -> None:
    dcp.save({"a": torch.ones(4)}, storage_writer=writer(path))
    back = {"a": torch.zeros(4), "new": torch.full((2,), 5.0)}
    with pytest.raises(CheckpointException, match="new"):
        dcp.load(back, storage_reader=reader(path))
    dcp.load(back, storage_reader=reader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert back["a"].sum() == 4 and back["new"].tolist() == [5, 5]


def another_shape(writer: Any, reader: Any, path: Path) -> None:
    dcp.save({"a": torch.ones(4)}, storage_writer=writer(path))
    with pytest.raises((CheckpointException, ValueError), match=r"mismatch|shape|size"):
        dcp.load({"a": torch.zeros(5)}, storage_reader=reader(path))


def save_over_another(writer: Any, reader: Any, path: Path) -> None:
    for fill in (1, 2):
        dcp.save({"a": torch.full((4,), float(fill))}, storage_writer=writer(path))
    back = {"a": torch.zeros(4)}
    dcp.load(back, storage_reader=reader(path))
    assert back["a"].tolist() == [2] * 4


def planners_that_do_not_flatten(writer: Any, reader: Any, path: Path) -> None:
    state = {"a": torch.arange(4.0), "n": 3}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=writer(path), planner=planner)
    back = {"a": torch.zeros(4), "n": 0}
    loader = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(back, storage_reader=reader(path), planner=loader)
    check_equal(back, state)


def asynchronous(writer: Any, reader: Any, path: Path) -> None:
    dist.barrier()
    state = {"w": distribute_tensor(torch.arange(12.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    dcp.async_save(state, storage_writer=writer(path)).result()
    back = {"w": torch.zeros_like(state["w"])}
    dcp.load(back, storage_reader=reader(path))
    check_equal(back, state)


def reshard_one_and_two_dims(writer: Any, reader: Any, path: Path) -> None:
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    value = torch.arange(63.0).view(7, 9)
    layouts = [
        (flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]),
        (square, [Shard(0), Shard(1)]), (square, [Shard(1), Shard(0)]),
        (square, [Replicate(), Shard(0)]), (square, [Shard(1), Replicate()]),
        (square, [Shard(0), Shard(0)]),
    ]  # fmt: skip
    for number, (mesh, placements) in enumerate(layouts):
        target = path / str(number)
        dcp.save({"w": distribute_tensor(value, mesh, placements)}, storage_writer=writer(target))
        for other_mesh, other in (layouts[number - 1], layouts[number - 3]):
            back = {"w": distribute_tensor(value * 0, other_mesh, other)}
            dcp.load(back, storage_reader=reader(target))
            check_equal(back["w"], value)


def tensor_parallel(writer: Any, reader: Any, path: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Both(), mesh, plan)
    before = {name: whole(p).clone() for name, p in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, storage_writer=writer(path))
    turned = {"first": RowwiseParallel(), "second": ColwiseParallel()}
    other = parallelize_module(Both(1), mesh, turned)
    state = {"model": other.state_dict()}
    dcp.load(state, storage_reader=reader(path))
    for name, tensor in state["model"].items():
        assert torch.equal(whole(tensor), before[name])


def hybrid_sharding(writer: Any, reader: Any, path: Path) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Both(), mesh=two)
    before = get_model_state_dict(model)
    dcp.save({"model": before}, storage_writer=writer(path))
    other = fully_shard(Both(1), mesh=init_device_mesh("cpu", (4,)))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, storage_reader=reader(path))
    check_equal(state["model"], before)


def fsdp_with_its_optimizer(writer: Any, reader: Any, path: Path) -> None:
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model = fully_shard(Both(), mesh=init_device_mesh("cpu", (4,)))
        optimizer = stepped(model)
        weights, states = get_state_dict(model, optimizer, options=options)
        target = path / str(flat)
        dcp.save({"model": weights, "optim": states}, storage_writer=writer(target))
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        other = fully_shard(Both(1), mesh=two)
        fresh = stepped(other)
        new_weights, new_states = get_state_dict(other, fresh, options=options)
        back = {"model": new_weights, "optim": new_states}
        dcp.load(back, storage_reader=reader(target))
        check_equal(back["model"], weights)
        check_equal(back["optim"], states)
        set_state_dict(
            other, fresh, model_state_dict=back["model"], optim_state_dict=back["optim"],
            options=options,
        )  # fmt: skip
        check_equal(get_optimizer_state_dict(other, fresh, options=options), states)


def fsdp_and_experts(writer: Any, reader: Any, path: Path) -> None:
    """As e2e/test_fsdp_ep: dense layers over all ranks, each expert on a mesh of its own."""

    def make() -> nn.Module:
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = nn.ModuleDict({"dense": Both(), "experts": Both()})
        fully_shard(model["experts"], mesh=world["dp"])
        fully_shard(model["dense"], mesh=init_device_mesh("cpu", (4,)))
        return model

    def named(model: nn.Module) -> dict[str, Any]:
        ep = dist.get_rank() % 2
        dense, experts = (
            {f"{part}.{name}": value for name, value in get_model_state_dict(model[part]).items()}
            for part in ("dense", "experts")
        )
        return dense | {name.replace("experts", f"experts.{ep}"): v for name, v in experts.items()}

    model = make()
    before = named(model)
    dcp.save({"model": before}, storage_writer=writer(path))
    back = {"model": zeros_like(named(make()))}
    dcp.load(back, storage_reader=reader(path))
    check_equal(back["model"], before)


def pipeline_stages(writer: Any, reader: Any, path: Path) -> None:
    """As e2e/test_pipeline: each rank has layers of its own, and later others."""

    def stage(rank: int, width: int) -> dict[str, torch.Tensor]:
        layers = range(rank * width, (rank + 1) * width)
        return {f"layers.{n}.weight": torch.full((3, 3), float(n)) for n in layers}

    rank = dist.get_rank()
    dcp.save({"model": stage(rank, 2)}, storage_writer=writer(path))
    back = {"model": zeros_like(stage(rank // 2, 4))}
    dcp.load(back, storage_reader=reader(path))
    check_equal(back["model"], stage(rank // 2, 4))


ONE_PROCESS = [
    plain_tensors_and_bytes, a_part_of_what_is_stored, a_key_that_is_not_stored, another_shape,
    save_over_another, planners_that_do_not_flatten,
]  # fmt: skip
FOUR_RANKS = [
    reshard_one_and_two_dims, tensor_parallel, hybrid_sharding, fsdp_with_its_optimizer,
    fsdp_and_experts, pipeline_stages,
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_PROCESS, ids=lambda case: case.__name__)
def test_a_case_of_torchs_tests_in_one_process(case: Any, tmp_path: Path) -> None:
    case(*OURS, tmp_path / "c")


def test_the_cases_of_torchs_tests_on_four_ranks(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        for case in FOUR_RANKS:
            case(*OURS, tmp_path / case.__name__)

    run_ranks(fn, 4)


def test_an_asynchronous_save_of_torchs_tests(tmp_path: Path) -> None:
    run_ranks(lambda rank, world_size: asynchronous(*OURS, tmp_path / "c"), 2)


def test_hugging_face_storage_and_ours_read_each_other(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        value = torch.arange(24.0).view(6, 4)
        state = {"lm_head.weight": distribute_tensor(value, mesh, [Shard(0)])}

        def check(reader: Any) -> None:
            back = {"lm_head.weight": distribute_tensor(value * 0, mesh, [Shard(1)])}
            dcp.load(back, storage_reader=reader)
            check_equal(back["lm_head.weight"], value)

        own = UnifiedStorageWriter(tmp_path / "ours", prefixes={"": "model"})
        dcp.save(state, storage_writer=own)
        check(UnifiedStorageReader(tmp_path / "ours"))
        check(HuggingFaceStorageReader(str(tmp_path / "ours")))
        theirs = HuggingFaceStorageWriter(
            str(tmp_path / "theirs"),
            fqn_to_index_mapping={"lm_head.weight": 1},
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(state, storage_writer=theirs)
        dist.barrier()
        check(UnifiedStorageReader(tmp_path / "theirs", prefixes={"": "model"}))

    run_ranks(fn, 2)
