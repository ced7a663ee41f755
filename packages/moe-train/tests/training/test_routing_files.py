"""A run's choices of experts on disk, and another run that goes by them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from moe_pipeline import MoEConfig, MoELayer
from moe_train.config import Config
from moe_train.early_checks import check_early
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training.routing_files import RoutingFiles
from ranktest import run_ranks

Configure = Callable[..., Config]
STEPS = ("train.max_steps=3", "train.gradient_accumulation_steps=2", "optimizer.lr=0.02")
LAYOUT = ("parallel.pp=2", "parallel.ep=2")


def figures(config: Config) -> dict[str, list[object]]:
    """The steps' figures of a job, which is run."""
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), config.world_size, timeout_s=120)
    lines = list(read_metrics(config.log_folder / "metrics.jsonl"))
    steps = [line for line in lines if "loss" in line]
    return {
        "loads": [[v for k, v in line.items() if k.startswith("expert_load/")] for line in steps],
        "losses": [line["loss"] for line in steps],
    }


def choices_in(folder: Path) -> dict[tuple[str, str, int], list[list[int]]]:
    """Every choice of a record, by step, layer and sample."""
    found: dict[tuple[str, str, int], list[list[int]]] = {}
    for path in folder.glob("step-*/rank-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            samples = [int(s) for s in file.metadata()["samples"].strip("[]").split(",")]
        for layer, rows in load_file(path).items():
            for sample, row in zip(samples, rows, strict=True):
                assert (path.parent.name, layer, sample) not in found
                found[path.parent.name, layer, sample] = row.tolist()
    return found


def test_a_run_in_another_layout_and_format_goes_by_the_choices_of_the_recorded_one(
    configure: Configure, tmp_path: Path
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    out = [f"train.output_dir={tmp_path}/{name}" for name in ("a", "b", "c", "d")]
    recorded = figures(configure(*STEPS, out[0], f"moe.record_routing={first}"))
    replay = f"moe.replay_routing={first}"
    recompute = ("train.recompute=selective", f"moe.record_routing={again}")
    same = figures(configure(*STEPS, *LAYOUT, *recompute, out[1], replay))
    assert same["loads"] == recorded["loads"]
    assert same["losses"] == pytest.approx(recorded["losses"], rel=1e-6)
    kept = choices_in(first)
    assert kept == choices_in(again)
    assert {step for step, _, _ in kept} == {f"step-0000000{n}" for n in (1, 2, 3)}
    rough = ("train.dtype=bfloat16", "train.master_weights=true")
    free, forced = (
        figures(configure(*STEPS, *LAYOUT, *rough, *more))
        for more in ((out[2],), (out[3], replay, "parallel.schedule=zb_1p"))
    )
    assert free["loads"] != recorded["loads"], "rounding decides nothing here; take other numbers"
    assert forced["loads"] == recorded["loads"]
    assert forced["losses"] == pytest.approx(recorded["losses"], rel=0.02)


def test_ranks_that_share_samples_record_their_positions_and_replay_them(
    configure: Configure, tmp_path: Path
) -> None:
    """Twelve tokens of a sample: five ranks have three, three, two, two and two."""
    more = {"num_attention_heads": 5}
    record, replay = (f"moe.{verb}_routing={tmp_path}/record" for verb in ("record", "replay"))
    shared = ("parallel.dp=5", "parallel.cp=5")
    recorded = figures(configure(*STEPS, *shared, f"train.output_dir={tmp_path}/a", record, **more))
    ring = ("parallel.pp=2", "parallel.ep=2", "parallel.cp=2", "parallel.cp_attention=ring")
    heads = ("parallel.dp=5", "parallel.tp=5")
    for folder, layout in (("b", ()), ("c", ring), ("d", heads)):
        rough = ("train.dtype=bfloat16", "train.master_weights=true")  # others by themselves
        out = f"train.output_dir={tmp_path}/{folder}"
        forced = figures(configure(*STEPS, *layout, *rough, out, replay, **more))
        assert forced["loads"] == recorded["loads"]


def test_a_step_that_is_done_again_leaves_one_record(configure: Configure, tmp_path: Path) -> None:
    record = f"moe.record_routing={tmp_path}/record"
    figures(configure(*STEPS, "parallel.dp=2", f"train.output_dir={tmp_path}/a", record))
    assert len(list((tmp_path / "record").glob("step-*/*"))) == 3 * 2
    figures(configure(*STEPS, f"train.output_dir={tmp_path}/b", record))
    assert len(list((tmp_path / "record").glob("step-*/*"))) == 3
    choices_in(tmp_path / "record")  # each sample once


def test_what_cannot_be_replayed_is_said(configure: Configure, tmp_path: Path) -> None:
    def layer(num_experts_per_tok: int = 2) -> nn.ModuleDict:
        config = MoEConfig(
            hidden_size=4,
            num_experts=3,
            num_experts_per_tok=num_experts_per_tok,
            moe_intermediate_size=4,
        )
        return nn.ModuleDict({"mlp": MoELayer(config)})

    def step(files: RoutingFiles, number: int, samples: list[int], module: nn.ModuleDict) -> None:
        with files.step(number, module, [np.array(samples[:1]), np.array(samples[1:])]):
            module["mlp"](torch.randn(1, 5, 4))
            module["mlp"](torch.randn(len(samples) - 1, 5, 4))

    for rank, samples in enumerate(([0, 1, 2], [3, 4, 5])):
        written = RoutingFiles(record=tmp_path, replay=None, data="some", rank=rank, length=5)
        step(written, 7, samples, layer())
    read = RoutingFiles(record=None, replay=tmp_path, data="some", rank=0, length=5)
    step(read, 7, [1, 4, 5, 0], layer())
    with pytest.raises(ValueError, match=r"no record of step 8; end with train.max_steps"):
        step(read, 8, [1, 2], layer())
    with pytest.raises(ValueError, match=r"for samples \[6, 9\], 2 in all; give every machine"):
        step(read, 7, [9, 5, 6], layer())
    with pytest.raises(ValueError, match="is of other data than this job's"):
        step(replace(read, data="other"), 7, [1, 2], layer())
    with pytest.raises(ValueError, match=r"shape \(5, 2\); the layer needs \[tokens, 1\]"):
        step(read, 7, [1, 2], layer(num_experts_per_tok=1))
    with pytest.raises(ValueError, match="lacks the choices of some layer"):
        step(read, 7, [1, 2], nn.ModuleDict({"other": layer(), "mlp": layer()["mlp"]}))
    path = tmp_path / "step-00000007" / "rank-00001.safetensors"
    path.write_bytes(b"no record")
    with pytest.raises(ValueError, match=f"cannot read the record {path}"):
        step(read, 7, [1, 2], layer())
    dense = nn.ModuleDict({"mlp": nn.Linear(4, 4)})
    step(replace(written, rank=9), 7, [1, 2], dense)
    assert not (path.parent / "rank-00009.safetensors").exists(), "a stage without experts"


def test_folders_that_cannot_be_meant_are_refused_at_once(
    configure: Configure, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"moe.replay_routing=.* holds no step-\*"):
        check_early(configure(f"moe.replay_routing={tmp_path}"), resuming=False)
    with pytest.raises(ValueError, match=r"are both .* which would be overwritten"):
        configure(f"moe.replay_routing={tmp_path}", f"moe.record_routing={tmp_path}")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"moe.record_routing=.* is a file"):
        check_early(configure(f"moe.record_routing={tmp_path}/file"), resuming=False)
