import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ranktest import run_ranks
from unified_ckpt import Shard, load, load_files, read_index, save
from unified_ckpt.errors import LoadError
from unified_ckpt.geometry import Box
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.state import find_tied_keys
from unified_ckpt.state.nested import flatten_state


class Pair(NamedTuple):
    ids: torch.Tensor
    epoch: int


class Counter:
    """A Stateful with nested state: tensors and values."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = {"ids": torch.full((3,), number), "names": ["a"] * number}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.seen = state["number"], state["seen"]


def test_a_nested_state_dict_comes_back_with_values_and_stateful_objects(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1)
    state = {
        "model": model,
        "data": Counter(2),
        "extra": {"deep": {"w": torch.arange(5), "n": None}, "list": [torch.ones(2), 3]},
        "lone": torch.tensor(1.5),
        "step": 7,
        "loss": float("nan"),
        "betas": (0.9, 0.95),
    }
    save(state, checkpoint_id=tmp_path / "c")
    assert set(read_index(tmp_path / "c")) == {*model.state_dict(), "lone"}
    assert set(read_index(tmp_path / "c", "extra")) == {"deep.w", "list.0"}
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    back = {
        "model": fresh,
        "data": Counter(0),
        "extra": {"deep": {"w": torch.arange(5) * 0, "n": 1}, "list": [torch.zeros(2), 0]},
        "lone": torch.tensor(0.0),
        "step": 0,
        "loss": 0.0,
        "betas": (0.0, 0.0),
    }  # fmt: skip
    back["data"].seen["ids"] = torch.zeros(3, dtype=torch.int64)
    weight = fresh[0].weight
    load(back, checkpoint_id=tmp_path / "c")
    assert fresh[0].weight is weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert (back["data"].number, back["data"].seen["names"]) == (2, ["a", "a"])
    assert back["data"].seen["ids"].tolist() == [2, 2, 2]
    assert back["extra"]["deep"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert back["extra"]["deep"]["n"] is None and back["extra"]["list"][1] == 3
    assert (back["lone"].item(), back["step"], back["betas"]) == (1.5, 7, (0.9, 0.95))
    assert back["loss"] != back["loss"]


def test_schedulers_with_counters_and_nested_schedulers_come_back(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], gamma=0.5)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        chain = torch.optim.lr_scheduler.ChainedScheduler([warm, steps])
        return optimizer, chain

    def rates(optimizer: Any, scheduler: Any, n: int) -> list[float]:
        found = []
        for _ in range(n):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    state = {"scheduler": scheduler, "lr": optimizer.param_groups[0]["lr"]}
    save(state, checkpoint_id=tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.safetensors"))
    expected = rates(optimizer, scheduler, 4)
    optimizer, scheduler = make()
    back = {"scheduler": scheduler, "lr": 0.0}
    load(back, checkpoint_id=tmp_path / "c")
    optimizer.param_groups[0]["lr"] = back["lr"]
    assert rates(optimizer, scheduler, 4) == expected


def test_leaves_that_are_neither_tensors_nor_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TypeError: extra.deep.when: a PosixPath is neither"):
        save({"extra": {"deep": {"when": Path("x")}}}, checkpoint_id=tmp_path / "c")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="state_dict is a list; expected Mapping"):
        save([torch.zeros(1)], checkpoint_id=tmp_path / "c")  # type: ignore[arg-type]


def test_values_must_be_equal_on_ranks_that_have_them(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        held = {"extra": {"only": rank}} if rank == 1 else {}
        save({"step": 3, **held}, checkpoint_id=tmp_path / "c")
        back = {"step": 0, "extra": {"only": 0}}
        load(back, checkpoint_id=tmp_path / "c")
        assert back == {"step": 3, "extra": {"only": 1}}
        with pytest.raises(ValueError, match="'step' is 0 on rank 0, 1 on rank 1"):
            save({"step": rank}, checkpoint_id=tmp_path / "d")

    run_ranks(fn, 2)


def test_a_missing_value_raises_before_anything_changes(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=tmp_path / "c")
    back = {"model": {"w": torch.zeros(2)}, "step": 0, "epoch": 5}
    with pytest.raises(LoadError, match="no value was saved for 'epoch'"):
        load(back, checkpoint_id=tmp_path / "c")
    assert back["model"]["w"].sum() == 0
    report = load(back, checkpoint_id=tmp_path / "c", strict=False)
    assert (report.missing, back["step"], back["epoch"]) == (("epoch",), 1, 5)


def test_values_in_tuples_beside_tensors_come_back(tmp_path: Path) -> None:
    def make(fill: int) -> dict[str, Any]:
        deep = Pair(torch.full((2,), fill), fill), fill
        return {"data": {"deep": deep, "same": (torch.full((1,), fill), "x")}}

    save(make(3), checkpoint_id=tmp_path / "c")
    back = make(0)
    load(back, checkpoint_id=tmp_path / "c")
    assert back["data"]["deep"][0].ids.tolist() == [3, 3]
    assert (back["data"]["deep"][0].epoch, back["data"]["deep"][1]) == (3, 3)
    assert back["data"]["same"][0].item() == 3 and back["data"]["same"][1] == "x"


def test_a_mapping_that_cannot_change_is_named_before_anything_changes(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "extra": {"n": 1, "t": torch.ones(1)}},
         checkpoint_id=tmp_path / "c")  # fmt: skip
    frozen = MappingProxyType({"n": 0, "t": torch.zeros(1)})
    back = {"model": {"w": torch.zeros(2)}, "extra": frozen}
    with pytest.raises(TypeError, match=r"extra.n: stands in a mappingproxy, which load cannot"):
        load(back, checkpoint_id=tmp_path / "c")
    assert back["model"]["w"].sum() == 0 and frozen["t"].item() == 0


def test_two_leaves_of_one_path_are_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    for state, message in (
        ({"model": {"a.b": one, "a": {"b": one * 2}}}, "part 'model' have the key 'a.b'"),
        ({"w": one, "model": {"w": one * 2}}, "part 'model' have the key 'w'"),
        ({"extra": {"a.b": 1, "a": {"b": 2, "t": one}}}, "two values have the path 'extra.a.b'"),
    ):
        with pytest.raises(ValueError, match=message):
            save(state, checkpoint_id=tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_empty_collections_at_the_top_are_parts_or_values(tmp_path: Path) -> None:
    save({"model": {}, "history": [1, 2]}, checkpoint_id=tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").exists()
    back: dict[str, Any] = {"model": {}, "history": []}
    load(back, checkpoint_id=tmp_path / "c")
    assert back == {"model": {}, "history": [1, 2]}
    save({}, checkpoint_id=tmp_path / "e")
    assert load({}, checkpoint_id=tmp_path / "e").num_tensors == 0
    assert [p.name for p in (tmp_path / "e").iterdir()] == ["manifest.json"]


def test_a_layout_places_plain_tensors_and_optimizer_states_like_their_parameter(
    tmp_path: Path,
) -> None:
    whole = torch.arange(24.0).view(6, 4)

    def boxes(rank: int, num: int) -> dict[str, Box]:
        return {"w": Box.whole((6, 4)).chunk(0, num=num, index=rank)}

    def fn(rank: int, world_size: int) -> None:
        rows = slice(*(a * 3 for a in (rank, rank + 1)))
        optimizer = {"w/moment1": whole[rows] * 2, "w/step": torch.tensor(4.0)}
        save(
            {"model": {"w": whole[rows]}, "optimizer": optimizer},
            checkpoint_id=tmp_path / "c",
            options=SaveOptions(layout=boxes(rank, 2)),
        )

    run_ranks(fn, 2)
    assert read_index(tmp_path / "c", "optimizer")["w/moment1"].shape == (6, 4)
    back = {"model": {"w": torch.zeros(2, 4)}, "optimizer": {"w/moment1": torch.zeros(2, 4)}}
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(layout=boxes(1, 3)))
    assert torch.equal(back["model"]["w"], whole[2:4])
    assert torch.equal(back["optimizer"]["w/moment1"], whole[2:4] * 2)


def test_a_layout_function_may_store_one_tensor_under_many_keys(tmp_path: Path) -> None:
    fused = torch.randn(2, 3, 4)

    def layout(key: str, tensor: torch.Tensor) -> list[Shard] | None:
        if key != "experts":
            return None
        return [
            Shard.of(f"experts.{n}", tensor[n], global_shape=(3, 4), offset=(0, 0))
            for n in range(2)
        ]

    state = {"model": {"experts": fused, "b": torch.ones(2)}}
    save(state, checkpoint_id=tmp_path / "c", options=SaveOptions(layout=layout))
    assert set(read_index(tmp_path / "c")) == {"experts.0", "experts.1", "b"}
    back = {"model": {"experts": torch.zeros(2, 3, 4), "b": torch.zeros(2)}}
    load(back, checkpoint_id=tmp_path / "c", options=LoadOptions(layout=layout))
    assert torch.equal(back["model"]["experts"], fused)


def test_tied_tensors_are_written_once_and_loads_fill_both(tmp_path: Path) -> None:
    embed = torch.randn(5, 3)
    state = {"embed.weight": embed, "norm": torch.ones(3), "head.weight": embed}
    tied = find_tied_keys(state)
    assert tied == {"head.weight": "embed.weight"}
    moments = {"embed.weight/moment1": embed * 2, "head.weight/moment1": embed * 2}
    save(
        {"model": state, "optimizer": moments},
        checkpoint_id=tmp_path / "c",
        options=SaveOptions(tied=tied),
    )
    assert set(read_index(tmp_path / "c")) == {"embed.weight", "norm"}
    assert set(read_index(tmp_path / "c", "optimizer")) == {"embed.weight/moment1"}
    # Untied memory, as on the last pipeline stage, and tied memory: both are filled.
    apart = {"embed.weight": torch.zeros(5, 3), "head.weight": torch.zeros(5, 3)}
    load({"model": apart}, checkpoint_id=tmp_path / "c")
    assert torch.equal(apart["embed.weight"], embed) and torch.equal(apart["head.weight"], embed)
    again = torch.zeros(5, 3)
    report = load(
        {"model": {"embed.weight": again, "head.weight": again}}, checkpoint_id=tmp_path / "c"
    )
    assert torch.equal(again, embed) and report.num_bytes == embed.numel() * 4
    with pytest.raises(ValueError, match=r"'head.weight' is tied to 'embed.weight', which no rank"):
        save(
            {"model": {"head.weight": embed}},
            checkpoint_id=tmp_path / "d",
            options=SaveOptions(tied=tied),
        )


def test_frozen_parameters_have_no_states_and_change_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(p for p in model.named_parameters() if p[1].requires_grad)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    assert {k.partition("/")[0] for k in read_index(tmp_path / "c", "optimizer")} == {
        "1.weight",
        "1.bias",
    }
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fresh[0].requires_grad_(requires_grad=False)
    load({"model": fresh}, checkpoint_id=tmp_path / "c")
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert not fresh[0].weight.requires_grad and fresh[1].weight.requires_grad


def test_flat_shards_of_ranks_become_whole_stored_tensors(tmp_path: Path) -> None:
    whole = torch.randn(5, 7)
    cuts = [0, 9, 9, 20, 35]

    def fn(rank: int, world_size: int) -> None:
        begin, end = cuts[rank], cuts[rank + 1]
        flat = Shard(
            key="w",
            tensor=whole.view(-1)[begin:end].clone(),
            box=Box((5, 7), (0, 0), (5, 7), (begin, end)),
        )
        save({"optimizer": [flat]}, checkpoint_id=tmp_path / "c")
        mine = torch.zeros(35 - begin)
        want = Shard(key="w", tensor=mine, box=Box((5, 7), (0, 0), (5, 7), (begin, 35)))
        load([want], checkpoint_id=tmp_path / "c", part="optimizer")
        assert torch.equal(mine, whole.view(-1)[begin:])

    run_ranks(fn, 4)
    back = torch.zeros(5, 7)
    load({"optimizer": {"w": back}}, checkpoint_id=tmp_path / "c")
    assert torch.equal(back, whole)


def test_flatten_copies_nothing() -> None:
    w = torch.randn(3, 3)
    flat = flatten_state({"model": {"a": w.T}, "n": 1})
    assert flat.parts["model"][0].tensor.data_ptr() == w.data_ptr()
    assert flat.values["n"].get() == 1


def test_the_parts_form_writes_no_state_file(tmp_path: Path) -> None:
    save(
        {"model": [Shard.of("w", torch.ones(1), global_shape=(1,), offset=(0,))]},
        checkpoint_id=tmp_path / "c",
    )
    with pytest.raises(LoadError, match=r"no file 'unified_ckpt.json'"):
        load_files(tmp_path / "c", "unified_ckpt.json")


class Remembering(torch.nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


SCALES = torch.arange(3.0)
EXTRA = {
    "tensor": SCALES,
    "dict": {"scale": SCALES, "inner": {"history": [SCALES + 1, (SCALES,), 2], 7: "x"}, "n": 3},
    "list": [SCALES, {"a": SCALES + 2}],
    "value": {"steps": 4, "shape": torch.Size([2, 3])},
    "nothing": None,
    "no tensors": {},
}


@pytest.mark.parametrize("fresh", [None, {}, torch.zeros(9), {"scale": torch.zeros(2)}])
@pytest.mark.parametrize("form", ["module", "state dict"])
@pytest.mark.parametrize("name", EXTRA)
def test_extra_states_of_modules_are_made_again_whatever_a_fresh_module_has(
    name: str, form: str, fresh: object, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(Remembering(EXTRA[name]))
    save({"model": model if form == "module" else model.state_dict()}, checkpoint_id=tmp_path / "c")
    again = torch.nn.Sequential(Remembering(copy.deepcopy(fresh)))
    if form == "module":
        load({"model": again}, checkpoint_id=tmp_path / "c")
    else:
        state = again.state_dict()
        load({"model": state}, checkpoint_id=tmp_path / "c")
        again.load_state_dict(state)
    assert repr(again[0].extra) == repr(EXTRA[name])


@pytest.mark.parametrize(
    "extra", [object(), {"q": SCALES.to_sparse()}, {1: SCALES, "1": SCALES}, [lambda: 0]]
)
def test_an_extra_state_that_no_load_can_make_again_is_refused_by_name(
    extra: object, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match=r"0\._extra_state"):
        save({"model": torch.nn.Sequential(Remembering(extra))}, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c").exists()
