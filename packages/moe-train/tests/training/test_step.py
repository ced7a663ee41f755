"""A step over real ranks against one written down with plain torch in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.layout import is_expert
from moe_train.model import DecoderStage, Target, decays
from moe_train.parallel import start
from moe_train.training.build import build_runner, build_stages, read_model_config
from moe_train.training.step import Asked, StepResult, StepRunner
from ranktest import collect_ranks, run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]

LAYOUTS = {
    "one rank": (),
    "dp2": ("parallel.dp=2",),
    "pp2 ep3": ("parallel.pp=2", "parallel.ep=3"),
    "pp2 forward then backward": ("parallel.pp=2", "parallel.schedule=forward_then_backward"),
    "pp2 ep3 zb_1p chunks dedup": (
        "parallel.pp=2",
        "parallel.ep=3",
        "parallel.schedule=zb_1p",
        "moe.dispatch_chunks=2",
        "moe.dispatch_route=dedup",
    ),
    "pp2 zb_2p recompute": (
        "parallel.pp=2",
        "parallel.schedule=zb_2p",
        "train.recompute=layers",
        "train.gradient_accumulation_steps=4",
    ),
    "ep2 cp2 sharing": ("parallel.ep=2", "parallel.cp=2", "parallel.sharding=2"),
    "pp2 dp2 ep2 cp2 zb_1p": (
        "parallel.pp=2",
        "parallel.dp=2",
        "parallel.ep=2",
        "parallel.cp=2",
        "parallel.schedule=zb_1p",
        "train.gradient_accumulation_steps=3",
    ),
}
STEPS, LR = 3, 0.02


def runner_of(config: Config) -> StepRunner:
    return build_runner(config, read_model_config(config), start(config), {})[0]


def trained(
    config: Config, batches: Batches, steps: int = STEPS
) -> list[tuple[list[StepResult], dict[str, Tensor], int]]:
    """Of each rank: its results, its trained (master) weights, its place among the ep ranks."""

    def run(rank: int, _: int) -> object:
        runner = runner_of(config)
        at = runner.parallel
        results = [
            runner.train(batches(config, step, at.sample_rank, at.num_sample_ranks), lr=LR)
            for step in range(steps)
        ]
        held = {n: p for n, p in runner.stages.named_parameters() if p.requires_grad}
        for name, master in runner.optimizer.master.items():
            assert torch.equal(held[name], master.to(held[name].dtype)), name
        return results, {**held, **runner.optimizer.master}, at.mesh.coordinate(rank)["ep"]

    return run_ranks(run, config.world_size, timeout_s=120)  # type: ignore[return-value]


def plain_losses(stage: DecoderStage, batches: list[Batch], count: int) -> list[Tensor]:
    """The cross entropies of the microbatches, each as its share of the mean over `count`."""
    sums = []
    for batch in batches:
        hidden, _ = stage.hidden_states(batch.input_ids, batch.position_ids)
        logits = stage.logits(hidden).flatten(0, 1).float()
        sums.append(F.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / count)
    return sums


def own_losses(stage: DecoderStage, batches: list[Batch], count: int) -> list[Tensor]:
    """The same shares by the stage itself, rounded as it rounds them in bfloat16."""
    return [
        stage(b.input_ids, b.position_ids, target=Target(b.labels, 1 / count)).loss for b in batches
    ]


def plainly_trained(
    config: Config,
    batches: Batches,
    losses_of: Callable[[DecoderStage, list[Batch], int], list[Tensor]] = plain_losses,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of the same steps, in one process without this package's step.

    Gradients of the microbatches and the update are in fp32, as with `master_weights`.
    """

    def run(*_: int) -> object:
        model = read_model_config(config)
        stage = build_stages(config, model, start(config)).by_number[0]
        # The weights that a job begins with.
        stage.load_state_dict(runner_of(config).stages.state_dict())
        held = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        master = {n: nn.Parameter(p.detach().float().clone()) for n, p in held.items()}
        settings = config.optimizer
        matrices = [p for n, p in master.items() if decays(n, p.shape)]
        others = [p for n, p in master.items() if not decays(n, p.shape)]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=LR,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )
        losses, norms = [], []
        for step in range(STEPS):
            parts = batches(config, step)
            count = sum(int((b.labels != -100).sum()) for b in parts)
            shares = losses_of(stage, parts, count)
            optimizer.zero_grad()
            for share in shares:
                stage.zero_grad()
                share.backward()
                for name, parameter in held.items():
                    so_far = master[name].grad
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    master[name].grad = grad.float() + (0 if so_far is None else so_far)
            norms.append(
                float(nn.utils.clip_grad_norm_(master.values(), settings.max_grad_norm or math.inf))
            )
            optimizer.step()
            for name, parameter in held.items():
                parameter.data.copy_(master[name].data)
            losses.append(sum(share.item() for share in shares))
        return losses, norms, dict(master)

    return run_ranks(run, 1)[0]  # type: ignore[return-value]


def compare(
    config: Config,
    batches: Batches,
    expected: tuple[list[float], list[float], dict[str, Tensor]],
    tolerance: float,
    *,
    rounded: float = 0.0,
) -> None:
    """rounded: by how much one weight of a hundred may differ, its gradient being rounded."""
    losses, norms, weights = expected
    seen = set()
    for results, held, ep in trained(config, batches):
        for step, result in enumerate(results):
            assert result.loss == pytest.approx(losses[step], rel=tolerance), step
            assert result.grad_norm == pytest.approx(norms[step], rel=10 * tolerance), step
        for name, tensor in held.items():
            seen.add(name)
            whole = weights[name]
            part = whole.chunk(config.parallel.ep)[ep] if is_expert(name) else whole
            if rounded:
                apart = (tensor - part).abs()
                assert apart.max() <= rounded, name
                if (apart > 50 * tolerance).sum() <= max(tensor.numel() / 100, 1):
                    continue
            torch.testing.assert_close(
                {name: tensor}, {name: part.float()}, rtol=tolerance, atol=50 * tolerance
            )
    assert seen == weights.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_every_layout_are_those_of_plain_torch(
    configure: Configure, random_batches: Batches, layout: str
) -> None:
    expected = plainly_trained(configure(), random_batches)
    assert all(norm > 0.75 for norm in expected[1]), "clipping to 0.5 would not be seen"
    assert expected[0][-1] < expected[0][0] - 0.05, "the weights would not move"
    compare(configure(*LAYOUTS[layout]), random_batches, expected, 1e-6)


# Several stages on a rank, or layers that do not divide; all of four layers and four microbatches.
PIPELINES = {
    "interleaved_1f1b": ("parallel.pp=2", "parallel.dp=2", "parallel.overlap_grad_reduce=true"),
    "interleaved_zero_bubble": (
        "parallel.pp=2",
        "parallel.ep=2",
        "train.gradient_accumulation_fusion=true",
    ),
    "interleaved_forward_then_backward": ("parallel.pp=2", "parallel.layer_split=cost"),
    "looped_bfs": ("parallel.pp=1", "parallel.stages_per_rank=4"),
    "zbv": ("parallel.pp=2", "parallel.ep=2", "parallel.overlap_grad_reduce=true"),
    "v_half": ("parallel.pp=2", "train.recompute=layers"),
    "v_min": ("parallel.pp=2",),
    "dualpipe_v": ("parallel.pp=2", "parallel.dp=2", "parallel.overlap_grad_reduce=true"),
    "auto": ("parallel.pp=2", "parallel.ep=2", "parallel.memory_limit_mib=4"),
    "1f1b": ("parallel.pp=3", "parallel.layer_split=cost"),
}


@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule_with_several_stages_on_a_rank_trains_as_plain_torch(
    configure: Configure, random_batches: Batches, tied: bool
) -> None:
    model: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    expected = plainly_trained(configure(**model), random_batches)
    for name in ("interleaved_1f1b", "zbv") if tied else PIPELINES:
        parts = ("train.gradient_accumulation_steps=4", f"parallel.schedule={name}")
        compare(configure(*parts, *PIPELINES[name], **model), random_batches, expected, 1e-6)


def test_without_a_limit_of_the_norm_nothing_is_clipped(
    configure: Configure, random_batches: Batches
) -> None:
    free = "optimizer.max_grad_norm=inf"
    expected = plainly_trained(configure(free), random_batches)
    clipped = plainly_trained(configure(), random_batches)
    assert expected[0][-1] != pytest.approx(clipped[0][-1], rel=1e-4)
    compare(configure(free, "parallel.ep=2"), random_batches, expected, 1e-6)


def test_an_embedding_on_two_stages_is_updated_and_counted_once(
    configure: Configure, random_batches: Batches
) -> None:
    expected = plainly_trained(configure(tie_word_embeddings=True), random_batches)
    assert "lm_head.weight" not in expected[2]
    config = configure("parallel.pp=2", "parallel.dp=2", tie_word_embeddings=True)
    compare(config, random_batches, expected, 1e-6)


@pytest.mark.parametrize("layout", ["one rank", "pp2 zb_1p"])
def test_master_weights_sum_and_update_bfloat16_in_fp32(
    configure: Configure, random_batches: Batches, layout: str
) -> None:
    low = ("train.dtype=bfloat16", "train.master_weights=true")
    expected = plainly_trained(configure(*low), random_batches, own_losses)
    split = ("parallel.pp=2", "parallel.schedule=zb_1p", "train.gradient_accumulation_fusion=true")
    overrides = split if layout == "pp2 zb_1p" else ()
    # Some processors multiply bfloat16 matrices by another way where a gradient was received.
    ulps = 2 * STEPS * LR * torch.finfo(torch.bfloat16).eps
    compare(configure(*low, *overrides), random_batches, expected, 1e-6, rounded=ulps)


TRAINABLE = {
    "experts of one layer": ("*.layers.1.mlp.experts.*",),  # the first of two stages has none
    "all but the last layer": ("!*.layers.1.*", "!*norm.weight"),
    "embedding": ("*embed_tokens*", "*.gate.weight"),
}


@pytest.mark.parametrize("frozen", TRAINABLE)
@pytest.mark.parametrize("layout", ["one rank", "pp2 ep3", "pp2 dp2 fused recompute shared"])
def test_frozen_parameters_stay_bit_equal_and_the_rest_trains_as_by_plain_torch(
    configure: Configure, random_batches: Batches, layout: str, frozen: str
) -> None:
    tied = {"tie_word_embeddings": frozen == "embedding"}
    trainable = f"train.trainable={list(TRAINABLE[frozen])}".replace("'", '"')
    more = ("parallel.pp=2", "parallel.dp=2", "train.gradient_accumulation_fusion=true")
    more = (*more, "train.recompute=layers", "parallel.sharding=2")
    config = configure(*LAYOUTS.get(layout, more), trainable, **tied)
    compare(
        config, random_batches, plainly_trained(configure(trainable, **tied), random_batches), 1e-6
    )

    def run(rank: int, _: int) -> object:
        runner = runner_of(config)
        before, at = state_of(runner), runner.parallel
        runner.train(
            batches := random_batches(config, 0, at.sample_rank, at.num_sample_ranks), lr=LR
        )
        runner.train(batches, lr=LR)
        after = state_of(runner)
        named = dict(runner.stages.named_parameters())
        kept = {name for name, p in named.items() if not p.requires_grad}
        assert all(torch.equal(before[name], after[name]) for name in kept)
        assert all(named[name].grad is None for name in kept)
        moments = sum(
            t.nbytes for group in runner.optimizer.moments().values() for t in group.values()
        )
        num_sharing = 2 if config.parallel.sharding else 1
        of_trained = 2 * sum(p.nbytes for p in named.values() if p.requires_grad)
        assert moments == of_trained // num_sharing
        return len(kept), len(named)

    counts = run_ranks(run, config.world_size, timeout_s=120)
    assert any(kept > 0 for kept, _ in counts)  # type: ignore[misc]


RANDOM = {
    "grouped": {"attention_dropout": 0.3},
    "latent": {
        "model_type": "deepseek_v2",
        "attention_dropout": 0.3,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
    },
    "jitter": {"model_type": "mixtral", "router_jitter_noise": 0.2, "num_local_experts": 6},
}


@pytest.mark.parametrize("kind", RANDOM)
def test_dropout_and_jitter_are_the_same_in_every_layout_and_in_recompute(
    configure: Configure, random_batches: Batches, kind: str
) -> None:
    def losses(*overrides: str, **changes: Any) -> list[list[float]]:
        config = configure(*overrides, **{**RANDOM[kind], **changes})

        def run(*_: int) -> object:
            runner = runner_of(config)
            at = runner.parallel
            found = []
            for step in (1, 2):
                batches = random_batches(config, 0, at.sample_rank, at.num_sample_ranks)
                runner.stages.begin_step(step)
                found.append(runner.train(batches, lr=1e-9).loss)
            return [*found, runner.evaluate(batches)[0]]

        return run_ranks(run, config.world_size, timeout_s=120)  # type: ignore[return-value]

    (one,) = losses()
    assert abs(one[0] - one[1]) > 1e-4, "the steps draw the same numbers"
    for overrides in (("train.recompute=layers",), LAYOUTS["pp2 ep3"], ("parallel.dp=2",)):
        for rank in losses(*overrides):
            assert rank == pytest.approx(one, rel=1e-6), overrides
    assert losses("train.gradient_accumulation_steps=1")[0] == pytest.approx(one, rel=1e-6)
    (without,) = losses(attention_dropout=0.0, router_jitter_noise=0.0)
    assert without[2] == pytest.approx(one[2], rel=1e-6), "evaluation is not without noise"
    assert abs(without[0] - one[0]) > 1e-4


def test_a_step_without_a_token_to_predict_changes_nothing(
    configure: Configure, random_batches: Batches
) -> None:
    config = configure("parallel.pp=2", "parallel.dp=2", "moe.aux_loss_coef=0.1")

    def run(*_: int) -> object:
        runner = runner_of(config)
        before, at = state_of(runner), runner.parallel
        batches = [
            Batch(
                input_ids=b.input_ids,
                labels=torch.full_like(b.labels, -100),
                position_ids=torch.full_like(b.position_ids, -1),
            )
            for b in random_batches(config, 0, at.sample_rank, at.num_sample_ranks)
        ]
        result = runner.train(batches, lr=LR)
        after = state_of(runner)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return result.loss, result.num_tokens, result.applied, sum(map(sum, result.load_LE))

    assert run_ranks(run, 4) == [(0.0, 0, False, 0)] * 4


def test_figures_are_equal_on_every_rank_and_count_tokens_and_routed_rows(
    configure: Configure, random_batches: Batches
) -> None:
    sizes = ("parallel.pp=3", "parallel.ep=2")
    model = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    config = configure(*sizes, **model)
    ranks = [results for results, _, _ in trained(config, random_batches)]
    assert all(results == ranks[0] for results in ranks[1:])
    (alone, _, _) = trained(configure(**model), random_batches)[0]
    for result, other in zip(ranks[0], alone, strict=True):
        assert result.num_tokens == 12 * 11
        assert [sum(load_E) for load_E in result.load_LE] == [12 * 12 * 2, 0, 12 * 12 * 2]
        assert result.load_LE == other.load_LE
        assert not result.stop_requested


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_one_ranks_request_to_stop_reaches_every_rank_and_the_step_is_done(
    configure: Configure, random_batches: Batches, asked: int
) -> None:
    config = configure("parallel.pp=2", "parallel.dp=2")

    def run(rank: int, _: int) -> object:
        runner = runner_of(config)
        at = runner.parallel
        before = [p.detach().clone() for p in runner.stages.parameters()]
        batches = random_batches(config, 0, at.sample_rank, at.num_sample_ranks)
        stopped = runner.train(batches, lr=LR, asked=Asked(stop=rank == asked)).stop_requested
        moved = [
            not torch.equal(p, b) for p, b in zip(runner.stages.parameters(), before, strict=True)
        ]
        again = runner.train(batches, lr=LR).stop_requested
        return stopped, any(moved), again

    assert run_ranks(run, 4) == [(True, True, False)] * 4


def state_of(runner: StepRunner) -> dict[str, Tensor]:
    """Copies of weights, buffers and moments."""
    held = dict(runner.stages.state_dict())
    for moment, tensors in runner.optimizer.moments().items():
        held |= {f"{name}/{moment}": tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def assert_same(state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert state.keys() == other.keys()
    assert not [name for name, tensor in state.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_a_loss_that_is_not_a_number_stops_every_rank_before_the_update(
    configure: Configure, random_batches: Batches, poisoned: int
) -> None:
    config = configure("parallel.pp=2", "parallel.dp=2")

    def run(rank: int, _: int) -> object:
        runner = runner_of(config)
        at = runner.parallel
        batches = random_batches(config, 0, at.sample_rank, at.num_sample_ranks)
        runner.train(batches, lr=LR)
        if rank == poisoned:
            weights = dict(runner.stages.named_parameters())
            name = next(name for name in weights if name.endswith("q_norm.weight"))
            weights[name].data[0] = math.nan
        before = state_of(runner)
        try:
            runner.train(batches, lr=LR)
        except RuntimeError as error:
            after = state_of(runner)
            same = [
                torch.equal(a.nan_to_num(-9), before[n].nan_to_num(-9)) for n, a in after.items()
            ]
            return type(error).__name__, str(error), all(same)
        return None

    (kind, message, unchanged), *others = run_ranks(run, 4)  # type: ignore[misc]
    assert kind == "NonFiniteLossError" and unchanged
    assert message == (
        "loss=nan and gradient norm=nan are not finite; lower optimizer.lr, lengthen "
        "optimizer.warmup_steps, or resume an earlier checkpoint"
    )
    assert others == [(kind, message, True)] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_is_the_sum_of_plain_cross_entropies(
    configure: Configure, random_batches: Batches, layout: str
) -> None:
    def plain(*_: int) -> object:
        config = configure()
        stage = runner_of(config).stages.by_number[0].eval()
        with torch.no_grad():
            return sum(part.item() for part in plain_losses(stage, random_batches(config, 5), 1))

    expected = run_ranks(plain, 1)[0]
    config = configure(*LAYOUTS[layout])

    def run(*_: int) -> object:
        runner = runner_of(config)
        at = runner.parallel
        return runner.evaluate(random_batches(config, 5, at.sample_rank, at.num_sample_ranks))

    for loss, num_tokens in run_ranks(run, config.world_size):  # type: ignore[misc]
        assert loss == pytest.approx(expected, rel=1e-6)
        assert num_tokens == 12 * 11


# What counts while it trains: loads for the expert bias, and the auxiliary loss of a whole step.
COUNTING: dict[str, Any] = {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
    "router_aux_loss_coef": 0.1,
}


def test_an_evaluation_between_steps_changes_nothing(
    configure: Configure, random_batches: Batches
) -> None:
    config = configure(
        "parallel.ep=2",
        "parallel.schedule=forward_then_backward",
        "moe.update_expert_bias=true",
        "moe.aux_loss_scope=global_batch",
        "moe.capacity_factor=1.5",
        "train.recompute=layers",
        **COUNTING,
    )

    def run(evaluates: bool) -> Callable[[int, int], object]:
        def on_rank(rank: int, _: int) -> object:
            runner = runner_of(config)
            results = []
            torch.manual_seed(3)
            for step in range(3):
                results.append(runner.train(random_batches(config, step, rank, 2), lr=LR))
                if evaluates:
                    before = state_of(runner)
                    runner.evaluate(random_batches(config, 50 + step, rank, 2))
                    assert_same(before, state_of(runner))
                    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
            return results, state_of(runner), torch.get_rng_state()

        return on_rank

    with_, without = run_ranks(run(True), 2), run_ranks(run(False), 2)
    for (results, state, random), (others, other_state, other_random) in zip(  # type: ignore[misc]
        with_, without, strict=True
    ):
        assert results == others
        assert_same(state, other_state)
        assert torch.equal(random, other_random)


def test_another_number_of_microbatches_than_the_schedules_is_refused(
    configure: Configure, random_batches: Batches
) -> None:
    config = configure()

    def run(*_: int) -> object:
        return runner_of(config).train(random_batches(config, 0)[:1], lr=LR)

    (outcome,) = collect_ranks(run, 1)
    assert outcome.error is not None and "2 microbatches, but 1 inputs" in outcome.error
