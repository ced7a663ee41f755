"""`data/checkpoint-version-N` were written by earlier versions of this package, and never change.

Version 2 is from before structures and types of values were stored. Small checkpoints are written
as version 3, those with large tables as version 4 (see `test_large_manifest.py`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unified_ckpt import load, load_files, save, verify_checkpoint
from unified_ckpt.errors import LoadError

DATA = Path(__file__).parent / "data"
OLD = DATA / "checkpoint-version-2"


class Data:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "n": 0, "t": (0, 0), "keys": {1: [0, (0,)]},
            "ids": torch.zeros(4, dtype=torch.int64), "l": [torch.zeros(2), 0],
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("version", [2, 3])
def test_a_checkpoint_of_an_older_version_still_loads(version: int) -> None:
    folder = DATA / f"checkpoint-version-{version}"
    assert f'"version":{version}'.encode() in load_files(folder, "manifest.json")
    assert verify_checkpoint(folder).problems == ()
    model, data = nn.Linear(3, 2), Data()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups)
    state: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "data": data, "step": 0, "pair": (0, (0, 0))
    }  # fmt: skip
    load(state, checkpoint_id=folder)
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and model.bias.tolist() == [0, 1]
    assert (state["step"], state["pair"]) == (7, (1, (2, 3)))
    assert optimizer.state[model.weight]["exp_avg"].tolist() == [[pytest.approx(0.1)] * 3] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.01]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.75)]
    assert data.state["ids"].tolist() == [0, 1, 2, 3] and data.state["l"][1] == 5
    inner = [2] if version == 2 else (2,)
    assert (data.state["n"], data.state["t"], data.state["keys"]) == (3, (1, 2), {30: [1, inner]})


def test_names_that_do_not_match_are_told_of_version_2_too() -> None:
    named = [(f"layer.{name}", p) for name, p in nn.Linear(3, 2).named_parameters()]
    with pytest.raises(LoadError, match=r"of 'layer.weight', .* of 'module.bias', 'module.weight'"):
        load({"optimizer": torch.optim.AdamW(named)}, checkpoint_id=OLD)


def test_an_older_package_refuses_what_is_written_now(tmp_path: Path) -> None:
    """It would take `{"@tuple": [...]}` for a dict."""
    save({"pair": (1, 2)}, checkpoint_id=tmp_path / "c")
    assert b'"version":3' in load_files(tmp_path / "c", "manifest.json")
