from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktest import run_ranks
from unified_ckpt import load, save
from unified_ckpt.errors import LoadError
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.state.optimizer.param_groups import StoredGroups, merge_groups

DECAY = {"dense.w": 0.1, "norm": 0.0, "expert.w": 0.3}


def optimizer_of(*groups: tuple[str, ...], decay: bool) -> torch.optim.AdamW:
    """Groups of parameters by name; with `decay` each has that of its first parameter."""
    named = [
        {
            "params": [(name, nn.Parameter(torch.ones(3))) for name in names],
            "weight_decay": DECAY[names[0]] if decay else 0.9,
        }
        for names in groups
    ]
    return torch.optim.AdamW(named, lr=0.5 if decay else 0.1)


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def test_ranks_with_other_groups_save_and_any_ranks_groups_load(tmp_path: Path) -> None:
    """Pipeline stages: the first has no experts, the second nothing but norms and experts."""
    stages = [(("dense.w",), ("norm",)), (("norm",), ("expert.w",))]

    def fn(rank: int, world_size: int) -> None:
        optimizer = optimizer_of(*stages[rank], decay=True)
        save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    for groups in (
        [("norm",)],
        [("expert.w",)],
        [("expert.w",), ("norm",), ("dense.w",)],
        [("norm",), ("dense.w",), ("expert.w",)],
    ):
        back = optimizer_of(*groups, decay=False)
        load({"optimizer": back}, checkpoint_id=tmp_path / "c")
        assert decays(back) == [DECAY[names[0]] for names in groups]
        assert [group["lr"] for group in back.param_groups] == [0.5] * len(groups)


def test_one_stored_group_may_fill_several(tmp_path: Path) -> None:
    saved = optimizer_of(("dense.w", "norm"), ("expert.w",), decay=True)
    save({"optimizer": saved}, checkpoint_id=tmp_path / "c")
    back = optimizer_of(("expert.w",), ("norm",), ("dense.w",), decay=False)
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert decays(back) == [0.3, 0.1, 0.1]
    assert back.param_groups[2]["betas"] == (0.9, 0.999)


def test_groups_that_join_different_hyperparameters_are_refused(tmp_path: Path) -> None:
    saved = optimizer_of(("dense.w",), ("norm",), decay=True)
    save({"optimizer": saved}, checkpoint_id=tmp_path / "c")
    back = optimizer_of(("dense.w", "norm"), decay=False)
    with pytest.raises(LoadError, match=r"'dense.w' and 'norm'.* with weight_decay 0.1 and 0.0"):
        load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert decays(back) == [0.9]
    options = LoadOptions(ignored_keys=(r"param_groups.*weight_decay",))
    load({"optimizer": back}, checkpoint_id=tmp_path / "c", options=options)
    assert decays(back) == [0.9] and back.param_groups[0]["lr"] == 0.5


def test_one_parameter_with_two_rates_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> None:
        optimizer = optimizer_of(("norm",), decay=True)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        with pytest.raises(ValueError, match=r"group of 'norm' has .*0.1.* on rank 0, .*0.2.* on"):
            save({"optimizer": optimizer}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    assert not list(tmp_path.iterdir())


def test_equal_groups_of_one_rank_keep_their_numbers() -> None:
    def group(number: int, name: str, rate: float) -> dict[str, Any]:
        where = f"optimizer.param_groups.{number}"
        return {f"{where}.lr": rate, f"{where}.params": [name]}

    first = group(0, "a", 0.1) | group(1, "b", 0.1) | {"epoch": 3}
    second = group(0, "c", 0.2) | group(1, "a", 0.1)
    values, params = merge_groups([first, second])
    rates = [f"optimizer.param_groups.{number}.lr" for number in range(3)]
    assert values[0] == {rates[0]: 0.1, rates[1]: 0.1, "epoch": 3}
    assert values[1] == {rates[2]: 0.2, rates[0]: 0.1}
    assert list(params.values()) == [["a"], ["b"], ["c"]]
    stored = StoredGroups(values[0] | values[1] | params)
    assert stored.number("optimizer.param_groups", ["c"], 0, ["lr"]) == 2
    assert stored.number("optimizer.param_groups", ["b", "a"], 7, ["lr"]) == 0
    assert stored.number("optimizer.param_groups", ["new"], 7, ["lr"]) == 7


def test_an_optimizer_of_one_group_stores_no_names(tmp_path: Path) -> None:
    saved = optimizer_of(("dense.w", "norm"), decay=True)
    save({"optimizer": saved}, checkpoint_id=tmp_path / "c", options=SaveOptions())
    assert "dense.w" not in (tmp_path / "c" / "unified_ckpt.json").read_text()
    back = optimizer_of(("norm", "dense.w"), decay=False)
    load({"optimizer": back}, checkpoint_id=tmp_path / "c")
    assert decays(back) == [0.1]


def test_learning_rates_that_are_tensors_differ_over_groups_of_ranks(tmp_path: Path) -> None:
    def make(name: str, rate: float) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(3))
        return torch.optim.AdamW([(name, weight)], lr=torch.tensor(rate, dtype=torch.float32))

    def fn(rank: int, world_size: int) -> None:
        save({"optimizer": make(f"w{rank}", 0.1 * (rank + 1))}, checkpoint_id=tmp_path / "c")

    run_ranks(fn, 2)
    for name, rate in (("w1", 0.2), ("w0", 0.1)):
        back = make(name, 0.0)
        tensor = back.param_groups[0]["lr"]
        load({"optimizer": back}, checkpoint_id=tmp_path / "c")
        assert back.param_groups[0]["lr"] is tensor and torch.equal(tensor, torch.tensor(rate))
    plain = torch.optim.AdamW([("w1", nn.Parameter(torch.ones(3)))])
    load({"optimizer": plain}, checkpoint_id=tmp_path / "c")
    assert plain.param_groups[0]["lr"] == torch.tensor(0.2).item()
