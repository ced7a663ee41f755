from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_alloc import AllocatorConfig, load_trace
from gpu_alloc.torch import forecast
from moe_train.config import Config
from moe_train.jobs.plan import count_parameters, plan_report
from moe_train.jobs.rank_alone import planned_otherwise
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


def test_the_plan_of_a_rank_has_two_buffers_of_states_that_live_on_the_host(
    configure: Configure, tmp_path: Path
) -> None:
    model = {"hidden_size": 512, "intermediate_size": 24576, "mlp_only_layers": [0, 1]}
    low = ("train.dtype=bfloat16", "train.master_weights=true")

    def planned(*keys: str) -> dict[str, int]:
        config, folder = configure(*low, *keys, **model), tmp_path / str(len(keys))
        plan_report(config, traces=folder, ranks=[0])
        return forecast(load_trace(trace_file(folder, 0)), "torch").peak_by_category

    here, there = _in_a_process(lambda: [planned(), planned("train.offload_optimizer=true")])
    assert here["optimizer"] > 6 * here["parameters"] - 1000, "12 bytes for each 2"
    # Of parts of 16 million elements, cut into pieces of 4 million; each element has 12 bytes.
    assert 0 < there["optimizer"] <= 2 * 20 * 2**20 * 12 < here["optimizer"]
    for category in ("parameters", "gradients"):
        assert there[category] == here[category]


def test_the_plan_of_a_rank_has_its_share_of_heads_and_widths(
    configure: Configure, tmp_path: Path
) -> None:
    """What four ranks share out, and besides it all of norms and routers."""
    model = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    model |= {"intermediate_size": 256, "mlp_only_layers": [0, 1], "tie_word_embeddings": True}

    def planned(*layout: str) -> tuple[dict[str, int], list[str]]:
        config, folder = configure(*layout, **model), tmp_path / layout[-1]
        told = plan_report(config, traces=folder, ranks=[1]).splitlines()
        return forecast(load_trace(trace_file(folder, 1)), "torch").peak_by_category, told

    layouts = [
        ("train.global_batch_size=8", "parallel.dp=4", f"parallel.tp={size}") for size in (1, 4)
    ]
    (whole, _), (shared, told) = _in_a_process(lambda: [planned(*keys) for keys in layouts])
    assert "(each 4 share their samples: tp 4)" in told[1]
    assert any(line.startswith("tensor, a step") for line in told)
    layer, embedding = 64 * 16 * (8 + 4 + 4 + 8) + 3 * 64 * 256, 64 * 320
    saved = (2 * layer + embedding) * 3 // 4 * 4  # of both layers three quarters, in fp32
    assert whole["parameters"] - shared["parameters"] == pytest.approx(saved, rel=0.01)
    assert whole["optimizer"] - shared["optimizer"] == pytest.approx(2 * saved, rel=0.01)


DENSE = {"hidden_size": 64, "intermediate_size": 256, "mlp_only_layers": [0, 1]}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}


def _most_activations(configure: Configure, folder: Path, *keys: str) -> int:
    """Bytes by storage when most of them are there, in the plan's trace of a rank."""
    config = configure("train.global_batch_size=16", "data.sequence_length=64", *keys, **DENSE)
    plan_report(config, traces=folder, ranks=[1])
    held: dict[int, int] = {}
    found = now = 0
    for event in load_trace(trace_file(folder, 1)):
        if event.action == "alloc" and not event.note:  # nothing else: an activation
            held[event.block_id] = event.size_bytes
            now += event.size_bytes
        elif event.action == "free":
            now -= held.pop(event.block_id, 0)
        found = max(found, now)
    return found


def test_activations_of_a_rank_stay_as_they_are_where_states_and_parameters_are_shared_out(
    configure: Configure, tmp_path: Path
) -> None:
    """Of as many tokens as without."""

    def most(level: int) -> int:
        keys = "parallel.dp=4", f"parallel.sharding={level}"
        return _most_activations(configure, tmp_path / str(level), *keys)

    whole, *shared = _in_a_process(lambda: [most(level) for level in range(4)])
    assert whole > 0 and max(shared) <= 1.05 * whole


def test_tensor_parallel_ranks_keep_what_they_gather_once(
    configure: Configure, tmp_path: Path
) -> None:
    """Of twice as many samples each, but half the heads, widths and positions: as much as without,
    but for whole inputs of two attentions, two MLPs and the head, and for that one's gradient
    whole, and in the order in which it is sent.
    """

    def most(*keys: str) -> int:
        return _most_activations(configure, tmp_path / "".join(keys), "parallel.dp=2", *keys)

    whole, shared = _in_a_process(lambda: [most(), most("parallel.tp=2")])
    tokens = 16 // 2 // 2 * 64
    gathered = 7 * tokens * DENSE["hidden_size"] * 4
    assert whole < shared <= 1.05 * (whole + gathered)


def test_ranks_that_share_experts_are_planned_with_their_part_of_each(
    configure: Configure, tmp_path: Path
) -> None:
    def planned(etp: int) -> tuple[dict[str, int], list[str]]:
        layout = ("train.global_batch_size=16", "parallel.dp=4", "parallel.ep=2")
        config, folder = configure(*layout, f"parallel.etp={etp}"), tmp_path / str(etp)
        told = plan_report(config, traces=folder, ranks=[1]).splitlines()
        return forecast(load_trace(trace_file(folder, 1)), "torch").peak_by_category, told

    (whole, _), (shared, told) = _in_a_process(lambda: [planned(1), planned(4)])
    assert "(each 4 share their experts: etp 4)" in told[1]
    assert any(line.startswith("experts, a step") for line in told)
    saved = 2 * 3 * (3 * 16 * 32) * 3 // 4 * 4  # two layers, three of six experts, in fp32
    assert whole["parameters"] - shared["parameters"] == pytest.approx(saved, abs=4096)
    assert whole["optimizer"] - shared["optimizer"] == pytest.approx(2 * saved, abs=8192)


def test_a_plan_says_what_it_does_not_follow(configure: Configure) -> None:
    config = configure(
        "parallel.pp=2", "parallel.schedule=auto", "parallel.overlap_grad_reduce=true",
        num_hidden_layers=4,
    )  # fmt: skip
    auto = _in_a_process(lambda: plan_report(config, ranks=[0]))
    assert '\nparallel.schedule="auto" is planned from counted work; a job measures' in auto
    assert "\nparallel.overlap_grad_reduce=true: planned as if what travels beside" in auto
    other = configure("parallel.dp=2", "parallel.sharding=3", "moe.dispatch_chunks=2")
    (line,) = planned_otherwise(other)
    assert line.startswith("moe.dispatch_chunks=2 and parallel.sharding=3: planned as if what")
    assert planned_otherwise(configure("parallel.dp=2")) == []


def test_experts_in_fp8_are_planned_without_their_kernels(
    configure: Configure, tmp_path: Path
) -> None:
    def peaks() -> list[tuple[int, int]]:
        found = []
        for fp8 in ("false", "true"):
            config = configure(f"model.experts_fp8={fp8}", "train.dtype='bfloat16'", hidden_size=64)
            plan_report(config, traces=tmp_path / fp8, ranks=[0])
            trace = load_trace(trace_file(tmp_path / fp8, 0))
            made = forecast(trace, "torch").peak_by_category
            found.append((made["parameters"], sum(made.values())))
        return found

    (weights, plain), (same, in_fp8) = _in_a_process(peaks)
    assert weights == same
    assert in_fp8 != plain, "operands in fp8 take memory of their own"


def test_ranks_that_share_rows_unevenly_are_planned(configure: Configure) -> None:
    layout = ("parallel.dp=2", "parallel.ep=2", "train.global_batch_size=16")
    configs = [configure(*layout, f"parallel.sharding={level}") for level in (0, 2, 3)]
    reports = _in_a_process(lambda: [plan_report(config, ranks=[2]) for config in configs])
    rows = [report.splitlines()[3].split() for report in reports]
    assert [row[:2] for row in rows] == [["rank", "2"]] * 3
    whole, gradients, parameters = (float(row[2]) for row in rows)
    assert max(gradients, parameters) < whole


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
