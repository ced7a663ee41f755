from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_alloc import AllocatorConfig, load_trace, replay
from moe_train.config import Config
from moe_train.jobs.plan import count_parameters, plan_report, record_rank, trace_file
from moe_train.model import DecoderStage, StageOptions
from moe_train.training import read_model_config
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


def test_the_trace_of_a_rank_holds_weights_gradients_and_moments(
    configure: Configure, tmp_path: Path
) -> None:
    def peaks(*overrides: str) -> list[int]:
        config = configure(*overrides)
        folder = tmp_path / f"{config.world_size}"
        folder.mkdir()
        run_ranks(lambda *_: record_rank(config, folder), config.world_size)
        traces = [load_trace(trace_file(folder, rank)) for rank in range(config.world_size)]
        return [replay(trace, AllocatorConfig()).peak_live_bytes for trace in traces]

    total = count_parameters(read_model_config(configure())).total
    (one,) = peaks()
    assert one > 4 * 4 * total
    first, last = peaks("parallel.pp=2")
    assert max(first, last) < one < first + last + 4 * 4 * total
    assert not (tmp_path / "run").exists(), "a plan writes nothing of a run"


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
