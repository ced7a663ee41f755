"""Keys of `[train]` that change in which numbers a step computes, held against one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.layout import is_expert
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from ranktest import run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]

BF16 = "train.dtype=bfloat16"
CHANCE = (BF16, "train.stochastic_rounding=true")
MASTERS = (BF16, "train.master_weights=true")


def trained(config: Config, random_batches: Batches) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of three steps, and the weights, of this rank of a group that is there."""
    runner = build_runner(config, read_model_config(config), start(config), {})[0]
    at, figures = runner.parallel, []
    for step in range(3):
        batches = random_batches(config, step, at.sample_rank, at.num_sample_ranks)
        result = runner.train(batches, lr=0.003)
        figures += [result.loss, result.grad_norm]
    return figures, {n: p.detach() for n, p in runner.stages.named_parameters()}


@pytest.fixture
def on_ranks(random_batches: Batches) -> Callable[..., list]:  # type: ignore[type-arg]
    def run(*jobs: Config) -> list:  # type: ignore[type-arg]
        world = jobs[0].world_size
        return run_ranks(
            lambda *_: [trained(job, random_batches) for job in jobs], world, timeout_s=120
        )

    return run


def test_weights_rounded_by_chance_are_the_same_bits_on_all_replicas_and_near_one_process(
    configure: Configure,
    on_ranks: Callable[..., list],  # type: ignore[type-arg]
) -> None:
    ((one, plain),) = on_ranks(configure(*CHANCE), configure(BF16))
    wanted, weights = one
    replicas = on_ranks(configure(*CHANCE, "parallel.dp=2"), configure(*CHANCE, "parallel.ep=2"))
    for (figures, held), (split_figures, _) in replicas:
        assert figures == pytest.approx(wanted, rel=0.02)
        assert split_figures == pytest.approx(wanted, rel=0.02)
        assert all(torch.equal(held[name], replicas[0][0][1][name]) for name in held)
    # Of the same gradients each expert gets the same bits wherever it is: here nearly all agree,
    # since sums of bfloat16 gradients differ in their last bits between layouts.
    for name, whole in weights.items():
        parts = [rank[1][1][name] for rank in replicas]
        found = torch.cat(parts) if is_expert(name) else parts[0]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, whole, rtol=0.05, atol=0.02)
    assert not all(torch.equal(plain[1][name], whole) for name, whole in weights.items())


def test_gradients_are_summed_over_ranks_in_the_asked_format(
    configure: Configure,
    on_ranks: Callable[..., list],  # type: ignore[type-arg]
) -> None:
    low = "train.grad_reduce_dtype=bfloat16"
    (((exact, _), (low_exact, _)),) = on_ranks(configure(), configure(*MASTERS))
    beside = "parallel.overlap_grad_reduce=true"
    (first, as_asked, narrow, masters, overlapped), *_ = on_ranks(
        configure("parallel.dp=2"),
        configure("parallel.dp=2", "train.grad_reduce_dtype=float32"),
        configure("parallel.dp=2", low),
        configure("parallel.dp=2", *MASTERS, low),
        configure("parallel.dp=2", *MASTERS, low, beside),
    )
    assert as_asked[0] == first[0], "float32 is what float32 gradients are summed in anyway"
    assert first[0] == pytest.approx(exact, rel=1e-5)
    assert narrow[0] != first[0]
    assert narrow[0] == pytest.approx(exact, rel=0.01)
    assert masters[0] == pytest.approx(low_exact, rel=0.02)
    assert overlapped[0] == masters[0], "beside the backward the same sums are taken"
