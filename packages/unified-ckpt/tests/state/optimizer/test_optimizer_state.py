from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from unified_ckpt import Shard, load, read_index, save
from unified_ckpt.errors import LoadError
from unified_ckpt.geometry.layouts.layouts import Box, expert_shards
from unified_ckpt.options import LoadOptions, SaveOptions

Pair = tuple[nn.Module, torch.optim.Optimizer]


def trained(kind: type[torch.optim.Optimizer], **options: object) -> Pair:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    decay = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest}]
    optimizer = kind(groups, lr=0.2, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def fresh(kind: type[torch.optim.Optimizer], **options: object) -> Pair:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    decay = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    return model, kind([{"params": decay}, {"params": rest}], lr=0.9, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_every_state_and_hyperparameter_of_an_optimizer_comes_back(
    kind: type[torch.optim.Optimizer], options: dict, tmp_path: Path
) -> None:
    model, optimizer = trained(kind, **options)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    again, back = fresh(kind, **options)
    load({"model": again, "optimizer": back}, checkpoint_id=tmp_path / "c")
    for mine, theirs in zip(back.param_groups, optimizer.param_groups, strict=True):
        skip = {"params"}
        assert {k: v for k, v in mine.items() if k not in skip} == {
            k: v for k, v in theirs.items() if k not in skip
        }
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert back.state[mine].keys() == optimizer.state[theirs].keys()
        for name, value in optimizer.state[theirs].items():
            assert torch.equal(back.state[mine][name], value), name
    for each, one in ((again, back), (model, optimizer)):
        torch.manual_seed(5)
        one.zero_grad()
        each(torch.randn(5, 3)).square().sum().backward()
        one.step()
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_moments_have_the_fields_names_under_the_parameters_keys(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.AdamW)
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert set(read_index(tmp_path / "c", "optimizer")) == {
        f"{name}/{state}" for name in names for state in ("moment1", "moment2", "step")
    }


def test_fp32_moments_of_bf16_parameters_stay_fp32(tmp_path: Path) -> None:
    """`Optimizer.load_state_dict` would cast them to the parameter's dtype."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([("w", weight)])
    exact = torch.rand(4)
    optimizer.state[weight] = {
        "step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact, "master_weight": exact * 3
    }  # fmt: skip
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    assert set(read_index(tmp_path / "c", "master_weights")) == {"w"}
    other = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    back = torch.optim.AdamW([("w", other)])
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert torch.equal(back.state[other]["exp_avg"], exact)
    assert torch.equal(back.state[other]["master_weight"], exact * 3)
    assert not back.state[other]["step"].is_meta and back.state[other]["step"].item() == 1


def test_master_weights_of_a_fresh_optimizer_come_from_somewhere_or_it_is_said(
    tmp_path: Path,
) -> None:
    def make(fill: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.full((4,), fill, dtype=torch.bfloat16))
        return weight, torch.optim.SGD([("w", weight)])

    weight, optimizer = make(2.0)
    optimizer.state[weight] = {"master_param": torch.full((4,), 2.0), "seen": torch.ones(2)}
    for name, removed in (("whole", False), ("without", True)):
        save(
            {"model": {"w": weight}, "optimizer": optimizer},
            checkpoint_id=tmp_path / name,
            options=SaveOptions(remove_master_weight=removed),
        )
    other, back = make(0.0)
    with pytest.raises(LoadError, match=r"'master_weights' lacks 'w'.*master_weight_compatible"):
        load({"model": {"w": other}, "optimizer": back}, checkpoint_id=tmp_path / "without")
    assert not back.state and other.sum() == 0
    for name, options in (
        ("whole", LoadOptions()),
        ("without", LoadOptions(master_weight_compatible=True)),
    ):
        other, back = make(0.0)
        load({"optimizer": back}, checkpoint_id=tmp_path / name, options=options)
        assert back.state[other]["master_param"].dtype == torch.float32
        assert back.state[other]["master_param"].tolist() == [2.0] * 4
        assert back.state[other]["seen"].tolist() == [1, 1]


def test_states_that_are_no_tensors_come_back_to_a_fresh_optimizer(tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.ones(4))
        return weight, torch.optim.SGD([("w", weight)])

    weight, optimizer = make()
    state = {"step": 7, "codes": torch.arange(4, dtype=torch.uint8), "history": [1, {"a": 2}]}
    optimizer.state[weight] = state
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    other, back = make()
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert torch.equal(back.state[other].pop("codes"), state.pop("codes"))
    assert back.state[other] == state


def test_collections_of_a_state_are_made_again_for_a_fresh_optimizer(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([("w", weight)])
    optimizer.state[weight] = {"history": [torch.ones(4), 1], "seen": ({"a": torch.ones(1)}, None)}
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    other = nn.Parameter(torch.ones(4))
    back = torch.optim.SGD([("w", other)])
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert back.state[other]["history"][0].tolist() == [1] * 4
    assert back.state[other]["history"][1] == 1
    assert back.state[other]["seen"] == ({"a": torch.ones(1)}, None)
    back.state[other] = {"history": [torch.zeros(9)], "seen": None}
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert back.state[other]["history"][0].tolist() == [1] * 4
    assert back.state[other]["seen"] == ({"a": torch.ones(1)}, None)


def test_ignored_states_of_a_fresh_optimizer_are_not_made(tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        return weight, torch.optim.SGD([("w", weight)])

    weight, optimizer = make()
    ones = torch.ones(4)
    optimizer.state[weight] = {"master_weight": ones, "exp_avg": ones, "seen": ones, "step": 3}
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    for patterns, kept in (
        (("w/", r"^w$"), set()),
        (("/step", "^w$"), {"exp_avg", "seen"}),
        (("/moment1",), {"exp_avg", "seen", "step", "master_weight"}),  # the others need a place
    ):
        other, back = make()
        options = LoadOptions(ignored_keys=patterns)
        load({"optimizer": back}, checkpoint_id=tmp_path / "c", options=options)
        assert set(back.state.get(other, {})) == kept, patterns
    assert back.state[other]["exp_avg"].count_nonzero() == 0


def test_several_optimizers_under_one_part_come_back_to_fresh_ones(tmp_path: Path) -> None:
    """Their keys have a prefix; a layout knows the parameters by their own names."""
    layout = {"v": Box((8,), (0,), (8,))}
    half = {"v": Box((8,), (4,), (4,))}

    def make(length: int) -> tuple[nn.Parameter, nn.Parameter, dict[str, torch.optim.Optimizer]]:
        w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(length))
        return w, v, {"dense": torch.optim.AdamW([("w", w)]), "sparse": torch.optim.SGD(
            [("v", v)], momentum=0.9)}  # fmt: skip

    w, v, optimizers = make(8)
    (w.sum() + (v * torch.arange(8)).sum()).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    options = SaveOptions(layout=layout)
    save({"optimizer": optimizers}, checkpoint_id=tmp_path / "c", options=options)
    w2, v2, back = make(4)
    load({"optimizer": back}, checkpoint_id=tmp_path / "c", options=LoadOptions(layout=half))
    expected = optimizers["dense"].state[w]["exp_avg"]
    assert torch.equal(back["dense"].state[w2]["exp_avg"], expected)
    assert back["sparse"].state[v2]["momentum_buffer"].tolist() == [4, 5, 6, 7]


def test_a_failed_load_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.SGD, momentum=0.9)
    save({"optimizer": optimizer, "model": {"w": torch.ones(1)}}, checkpoint_id=tmp_path / "c")
    _, back = fresh(torch.optim.SGD, momentum=0.9)
    state = {"optimizer": back, "model": {"other": torch.ones(1)}}
    with pytest.raises(LoadError, match="lacks 'other'"):
        load(state, checkpoint_id=tmp_path / "c")
    assert not back.state
    load(state, checkpoint_id=tmp_path / "c", strict=False)
    assert len(back.state) == 4


def test_the_state_dict_of_dcp_is_taken_too(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    state = get_optimizer_state_dict(model, optimizer)
    save({"optimizer": state}, checkpoint_id=tmp_path / "c")
    again, back = fresh(torch.optim.AdamW)
    template = get_optimizer_state_dict(again, back)
    load({"optimizer": template}, checkpoint_id=tmp_path / "c")
    set_optimizer_state_dict(again, back, template)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        for name, value in optimizer.state[theirs].items():
            assert torch.equal(back.state[mine][name], value), name
    assert [g["weight_decay"] for g in back.param_groups] == [0.3, 0.01]


def test_states_are_never_dropped_silently(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.AdamW)
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    _, back = fresh(torch.optim.AdamW)
    with pytest.raises(LoadError, match=r"holds states of '0.weight'.*none to fill"):
        load({"optimizer": back.state_dict()}, checkpoint_id=tmp_path / "c")
    report = load({"optimizer": back.state_dict()}, checkpoint_id=tmp_path / "c", strict=False)
    assert report.missing == ("0.weight", "1.weight", "0.bias", "1.bias")
    unnamed = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match=r"make the optimizer from model.named_parameters\(\)"):
        save({"optimizer": unnamed}, checkpoint_id=tmp_path / "d")


def test_an_optimizer_before_its_first_step_has_no_states(tmp_path: Path) -> None:
    _, optimizer = fresh(torch.optim.AdamW)
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    _, back = fresh(torch.optim.AdamW)
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert not back.state


def test_a_fresh_optimizer_of_fused_parameters_gets_states_stored_by_expert(tmp_path: Path) -> None:
    def layout(key: str, tensor: torch.Tensor) -> list[Shard] | None:
        return expert_shards("experts.{expert}", tensor, [2, 5]) if key == "fused" else None

    weight = nn.Parameter(torch.randn(2, 3, 4))
    optimizer = torch.optim.AdamW([("fused", weight)])
    weight.square().sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c", options=SaveOptions(layout=layout))
    assert "experts.5/moment2" in read_index(tmp_path / "c", "optimizer")
    other = nn.Parameter(torch.zeros(2, 3, 4))
    back = torch.optim.AdamW([("fused", other)])
    load({"optimizer": back}, checkpoint_id=tmp_path / "c", options=LoadOptions(layout=layout))
    assert torch.equal(back.state[other]["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert torch.equal(back.state[other]["exp_avg_sq"], optimizer.state[weight]["exp_avg_sq"])
    assert back.state[other]["step"] == 1
