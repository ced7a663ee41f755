from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_alloc import AllocatorConfig, load_trace
from gpu_alloc.torch import forecast
from moe_train.config import Config
from moe_train.jobs.plan import count_parameters, plan_report
from moe_train.model import DecoderStage, StageOptions
from moe_train.training import read_model_config
from moe_train.training.memory import trace_file
from ranktest import run_ranks

Configure = Callable[..., Config]


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_without_building_the_decoder(
    configure: Configure, tied: bool
) -> None:
    model = read_model_config(configure(mlp_only_layers=[1], tie_word_embeddings=tied))
    counted = count_parameters(model)
    stage = DecoderStage(model, StageOptions(layers=range(2), first=True, last=True))
    assert counted.total == sum(p.numel() for p in stage.parameters())
    # A decoder with 2 experts uses both for each token; its router has 4 rows fewer.
    smaller = read_model_config(
        configure(mlp_only_layers=[1], tie_word_embeddings=tied, num_experts=2)
    )
    both = count_parameters(smaller)
    assert both.active == both.total == counted.active - 4 * model.hidden_size


def _in_a_process(work: Callable[[], object]) -> Any:
    """Fake tensors start threads of autograd, after which this process could fork no ranks."""
    return run_ranks(lambda *_: work(), 1, init=False, timeout_s=300)[0]


def test_the_plan_of_one_rank_holds_weights_gradients_and_moments(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("parallel.pp=2", "parallel.ep=2")
    folder = tmp_path / "traces"
    report = _in_a_process(lambda: plan_report(config, traces=folder, ranks=[3]))
    header, row, assumed = report.splitlines()[2:5]
    assert row.startswith("rank 3 ")
    assert "tokens choose experts evenly" in assumed
    trace = load_trace(trace_file(folder, 3))
    found = forecast(trace, "gpu-alloc", AllocatorConfig())
    parts = found.peak_by_category
    # Each of two stages has one layer, each rank half of its experts.
    stage = DecoderStage(
        read_model_config(config), StageOptions(layers=range(1), first=True, last=True)
    )
    assert parts["parameters"] <= 4 * sum(p.numel() for p in stage.parameters())
    assert parts["optimizer"] > 2 * parts["parameters"], "two moments, and the steps"
    assert parts["gradients"] <= parts["parameters"]
    assert parts["dispatch buffers"] > 0
    assert sum(parts.values()) == found.peak_bytes
    columns = row.split()
    assert columns[2] == f"{found.peak_bytes / 2**20:.1f}", header
    assert not (tmp_path / "run").exists(), "a plan writes nothing of a run"


def test_the_plan_of_a_rank_has_its_share_of_moments_and_gradients(
    configure: Configure, tmp_path: Path
) -> None:
    def peaks(sharding: int) -> dict[str, int]:
        config = configure("parallel.dp=3", f"parallel.sharding={sharding}")
        folder = tmp_path / str(sharding)
        plan_report(config, traces=folder, ranks=[1])
        return forecast(load_trace(trace_file(folder, 1)), "torch").peak_by_category

    whole, moments, gradients = _in_a_process(lambda: [peaks(level) for level in (0, 1, 2)])
    third = pytest.approx(whole["optimizer"] / 3, rel=0.05)
    assert moments["optimizer"] == third
    assert gradients["optimizer"] == third
    assert sum(gradients.values()) < sum(moments.values()) < sum(whole.values())
    assert gradients["gradients"] == pytest.approx(whole["parameters"] / 3, rel=0.05)


def test_a_plan_says_what_it_does_not_follow(configure: Configure) -> None:
    config = configure(
        "parallel.pp=2", "parallel.schedule=auto", "parallel.overlap_grad_reduce=true",
        num_hidden_layers=4,
    )  # fmt: skip
    lines = _in_a_process(lambda: plan_report(config, ranks=[0])).splitlines()
    assert any(line.startswith("planned without parallel.overlap_grad_reduce") for line in lines)
    assert any(line.startswith('planned as parallel.schedule="zbv"') for line in lines)
    config = configure("parallel.dp=2", "parallel.sharding=3")
    lines = _in_a_process(lambda: plan_report(config, ranks=[0])).splitlines()
    assert any(line.startswith("planned as parallel.sharding=2") for line in lines)
    other = configure("model.experts_fp8=true", "train.dtype=bfloat16", "moe.dispatch_chunks=2")
    lines = _in_a_process(lambda: plan_report(other, ranks=[0])).splitlines()
    assert any(line.startswith("planned without model.experts_fp8") for line in lines)
    assert any(line.startswith("moe.dispatch_chunks=2 is planned as if each") for line in lines)
    plain = _in_a_process(lambda: plan_report(configure("parallel.dp=2"), ranks=[0]))
    assert "\nplanned " not in plain


def test_a_job_is_planned_that_no_memory_of_this_machine_could_hold(configure: Configure) -> None:
    config = configure(
        "parallel.pp=2", "parallel.ep=8", "train.global_batch_size=16", "train.dtype='bfloat16'",
        hidden_size=8192, moe_intermediate_size=8192, num_experts=64,
    )  # fmt: skip
    report = _in_a_process(lambda: plan_report(config, ranks=[13]))
    peak_gib = float(report.splitlines()[3].split()[2]) / 1024
    expert_gib = 8 * 3 * 8192**2 * 2 / 2**30
    assert peak_gib > 4 * expert_gib, "weights, gradients and two moments of 8 experts"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_refused(configure: Configure, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is none of the job's 2; give 0 to 1"):
        plan_report(configure("parallel.pp=2"), ranks=[rank])


def test_a_layout_that_does_not_fit_is_refused_before_any_rank_starts(
    configure: Configure,
) -> None:
    config = configure("parallel.ep=4", "train.global_batch_size=16")
    with pytest.raises(ValueError, match=r"parallel\.ep=4 ranks cannot share num_experts=6"):
        plan_report(config)


def test_a_large_decoder_is_counted_without_its_memory(configure: Configure) -> None:
    large = {"hidden_size": 8192, "moe_intermediate_size": 8192, "num_experts": 512}
    count = count_parameters(read_model_config(configure(**large)))
    experts = 2 * 512 * 3 * 8192 * 8192
    assert experts < count.total < 1.01 * experts
    assert count.active < 0.01 * count.total
