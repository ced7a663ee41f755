"""Gradients of ranks with real gloo groups, against sums of `torch.autograd.grad` in one process.

The layout is dp=2 x ep=2: every rank holds the dense parameters, and the expert of its column.
"""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_pipeline.schedules import Action
from moe_train.optim import grads
from moe_train.optim.grads import (
    GradientStore,
    ParameterGroup,
    StageBlocks,
    clip_coefficient,
    slices_of,
)
from ranktest import run_ranks

DTYPES = {"weight": torch.float32, "low": torch.bfloat16, "bias": torch.float32}
MICROBATCHES = 3


def dense_parameters() -> dict[str, nn.Parameter]:
    """fp32 and bf16 side by side, so that one group holds more than one dtype."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"weight": (6, 6), "low": (6, 5), "bias": (5,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(DTYPES[name]))
        for name, shape in shapes.items()
    }


def expert(number: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(100 + number)
    return nn.Parameter(torch.randn(6, 6, generator=generator))


def tokens(rank: int, microbatch: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def dense_loss(dense: dict[str, nn.Parameter], rank: int, microbatch: int) -> Tensor:
    x = tokens(rank, microbatch) @ dense["weight"]
    return (x.bfloat16() @ dense["low"] + dense["bias"]).float().square().sum() / 50


def expert_loss(weight: nn.Parameter, number: int, replica: int, microbatch: int) -> Tensor:
    """Of the tokens that both ranks of a replica send to the expert: every other one."""
    sent = torch.cat([tokens(2 * replica + ep, microbatch)[number::2] for ep in (0, 1)])
    return (sent @ weight).square().sum() / 50


def summed(losses: list[Tensor], parameter: nn.Parameter) -> Tensor:
    """The sum of the gradients in fp32."""
    grads = [torch.autograd.grad(loss, parameter, retain_graph=True)[0] for loss in losses]
    return torch.stack([grad.float() for grad in grads]).sum(0)


def expected_gradients() -> dict[str, Tensor]:
    """What one process computes from the tokens of all ranks."""
    dense = dense_parameters()
    losses = [dense_loss(dense, r, m) for r in range(4) for m in range(MICROBATCHES)]
    grads = {name: summed(losses, parameter) for name, parameter in dense.items()}
    for number in (0, 1):
        weight = expert(number)
        parts = [expert_loss(weight, number, d, m) for d in (0, 1) for m in range(MICROBATCHES)]
        grads[f"expert {number}"] = summed(parts, weight)
    return grads


def grads_of_ranks(
    *, fp32_accumulation: bool, max_norm: float
) -> list[tuple[dict[str, Tensor], float, dict[str, Tensor]]]:
    """Of each rank: reduced gradients, its share of the squared norm, clipped gradients."""

    def run(rank: int, _: int) -> object:
        replica, number = divmod(rank, 2)
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        dense, mine = dense_parameters(), expert(number)
        groups = [
            ParameterGroup(parameters=list(dense.values()), reduce_group=dist.group.WORLD),
            ParameterGroup(parameters=[mine], reduce_group=columns[number]),
        ]
        store = GradientStore(groups, fp32_accumulation=fp32_accumulation)
        store.clear()
        for m in range(MICROBATCHES):
            (dense_loss(dense, rank, m) + expert_loss(mine, number, replica, m)).backward()
        with store.reducing():
            pass
        held = {**dense, f"expert {number}": mine}
        reduced = {name: store.of(parameter).clone() for name, parameter in held.items()}
        share = store.norm_squared()
        square = torch.tensor(share, dtype=torch.float64)
        dist.all_reduce(square)
        store.scale(clip_coefficient(math.sqrt(square), max_norm))
        return reduced, share, {name: store.of(p).clone() for name, p in held.items()}

    return run_ranks(run, 4)  # type: ignore[return-value]


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_gradients_of_all_ranks_and_microbatches_are_summed_over_the_right_ranks(
    fp32_accumulation: bool,
) -> None:
    expected = expected_gradients()
    ranks = grads_of_ranks(fp32_accumulation=fp32_accumulation, max_norm=math.inf)
    for rank, (reduced, _, unclipped) in enumerate(ranks):
        assert reduced.keys() == {*DTYPES, f"expert {rank % 2}"}
        for name, grad in reduced.items():
            low = name == "low" and not fp32_accumulation
            tolerance = 0.02 if low else 1e-5
            assert grad.dtype == (torch.bfloat16 if low else torch.float32), name
            torch.testing.assert_close(
                {name: grad.float()}, {name: expected[name]}, rtol=tolerance, atol=tolerance
            )
            assert torch.equal(grad, unclipped[name]), "an infinite limit does not clip"


def test_every_holder_of_a_parameter_has_the_same_gradient_bit_for_bit() -> None:
    ranks = [
        reduced for reduced, _, _ in grads_of_ranks(fp32_accumulation=False, max_norm=math.inf)
    ]
    for name in DTYPES:
        assert all(torch.equal(ranks[0][name], other[name]) for other in ranks[1:]), name
    for number in (0, 1):
        name = f"expert {number}"
        assert torch.equal(ranks[number][name], ranks[number + 2][name])


def test_norm_and_clipping_over_ranks_are_those_of_torch_on_the_gathered_model() -> None:
    gathered = []
    for name, grad in expected_gradients().items():
        gathered.append((name, nn.Parameter(torch.zeros_like(grad))))
        gathered[-1][1].grad = grad
    norm = torch.nn.utils.clip_grad_norm_([parameter for _, parameter in gathered], 2.0)
    assert norm > 4, "the limit would not be reached"
    ranks = grads_of_ranks(fp32_accumulation=True, max_norm=2.0)
    total = sum(share for _, share, _ in ranks)
    assert math.sqrt(total) == pytest.approx(float(norm), rel=1e-6)
    for _, _, clipped in ranks:
        for name, parameter in gathered:
            if name in clipped:
                torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_a_rank_whose_tokens_miss_a_parameter_takes_part_with_zeros(
    fp32_accumulation: bool,
) -> None:
    def run(rank: int, _: int) -> object:
        reached, missed = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        group = ParameterGroup(parameters=[reached, missed], reduce_group=dist.group.WORLD)
        store = GradientStore([group], fp32_accumulation=fp32_accumulation)
        store.clear()
        if rank == 1:
            (reached * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        with store.reducing():
            pass
        return store.of(reached).tolist(), store.of(missed).tolist(), store.norm_squared()

    for reached, missed, share in run_ranks(run, 3):  # type: ignore[misc]
        assert (reached, missed) == ([1.0, 2.0, 3.0], [0.0, 0.0])
        assert share == pytest.approx(14 / 3)


@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_a_cleared_store_holds_nothing_of_the_step_before(fp32_accumulation: bool) -> None:
    weight = nn.Parameter(torch.zeros(3))
    group = ParameterGroup(parameters=[weight], reduce_group=None)
    store = GradientStore([group], fp32_accumulation=fp32_accumulation)
    for factor in (5.0, 1.0):
        store.clear()
        for _ in range(2):
            (factor * weight).sum().backward()
        with store.reducing():
            pass
        assert store.of(weight).tolist() == [2 * factor] * 3


def test_nothing_stays_of_a_store_that_adds_up_gradients_and_is_let_go() -> None:
    weight = nn.Parameter(torch.zeros(3))
    group = ParameterGroup(parameters=[weight], reduce_group=None)
    store = GradientStore([group], fp32_accumulation=True)
    weight.sum().backward()
    left = [weakref.ref(each) for each in (weight, store)]
    del weight, group, store
    gc.collect()
    assert [of() for of in left] == [None, None]


def test_one_rank_that_is_not_finite_makes_the_norm_of_all_not_finite() -> None:
    def run(rank: int, _: int) -> float:
        weight = nn.Parameter(torch.ones(2))
        group = ParameterGroup(parameters=[weight], reduce_group=dist.group.WORLD)
        store = GradientStore([group], fp32_accumulation=False)
        store.clear()
        (weight * (math.inf if rank == 1 else 1.0)).sum().backward()
        with store.reducing():
            pass
        return store.norm_squared()

    assert run_ranks(run, 2) == [math.inf, math.inf]


def test_sums_over_ranks_are_taken_in_the_asked_format_and_stored_in_the_gradients_own() -> None:
    low = torch.tensor([1.0, 0.3, 3.0]).bfloat16()
    high = torch.tensor([1 + 2**-9, 2.0, -1.0])

    def run(rank: int, _: int) -> object:
        found = []
        for dtype, reduced in ((low, torch.float32), (high, torch.bfloat16), (high, None)):
            parameter = nn.Parameter(torch.zeros_like(dtype))
            parameter.grad = dtype.clone()
            group = ParameterGroup(parameters=[parameter], reduce_group=dist.group.WORLD)
            store = GradientStore([group], fp32_accumulation=False, reduce_dtype=reduced)
            with store.reducing():
                pass
            found.append(store.of(parameter))
        return found

    for in_wide, in_narrow, in_own in run_ranks(run, 3):  # type: ignore[misc]
        assert torch.equal(in_wide, (3 * low.float()).bfloat16())
        rounded = high.bfloat16()
        assert in_narrow.dtype == torch.float32
        assert torch.equal(in_narrow, (rounded + rounded + rounded).float())
        assert torch.equal(in_own, high + high + high)


@pytest.mark.parametrize("sizes", [[], [1], [3, 3, 3], [9, 1, 1, 1], [1, 1, 1, 9]])
def test_slices_hold_every_gradient_once_and_few_at_a_time(sizes: list[int]) -> None:
    parts = [sizes[part] for part in slices_of(sizes, 4)]
    assert [size for part in parts for size in part] == sizes
    assert all(sum(part[:-1]) < 4 for part in parts)


# What a rank with two stages does, of which the second also uses the first one's embedding.
ROWS = {
    "backwards": ("0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"),
    "weights last": ("0F0", "1F0", "0F1", "1F1", "1I0", "0I0", "1I1", "0I1", "0W1", "1W0", "1W1"),
}


@pytest.mark.parametrize("fp32_accumulation", [False, True])
@pytest.mark.parametrize("row", ROWS)
def test_gradients_leave_when_the_last_computation_of_their_stages_has_made_them(
    monkeypatch: pytest.MonkeyPatch, row: str, fp32_accumulation: bool
) -> None:
    monkeypatch.setattr(grads, "_BUCKET_BYTES", 1)
    actions = [Action.parse(text) for text in ROWS[row]]

    def run(rank: int, _: int) -> object:
        names = ("shared", "of 0", "norm of 0", "of 1", "never")
        held = {name: nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for name in names}
        stages = {"shared": {0, 1}, "of 1": {1}, "never": {1}}
        store = GradientStore(
            [ParameterGroup(parameters=list(held.values()), reduce_group=dist.group.WORLD)],
            fp32_accumulation=fp32_accumulation,
            overlap=actions,
            stages={
                number: StageBlocks(
                    module=nn.Module(),
                    parameters=[p for n, p in held.items() if number in stages.get(n, {0})],
                    blocks=[],
                )
                for number in (0, 1)
            },
        )
        # By kind and stage what gets a gradient; norms get theirs with those of the inputs.
        made = {
            "B1": ("of 1", "shared"),
            "B0": ("of 0", "norm of 0", "shared"),
            "I1": ("shared",),
            "I0": ("norm of 0",),
            "W1": ("of 1",),
            "W0": ("of 0", "shared"),
        }
        found = []
        for _ in range(2):
            store.clear()
            started, numbers = [], dict.fromkeys(names, 0)
            with store.reducing() as around:
                assert around is not None
                for action in actions:
                    with around(action):
                        for name in made.get(f"{action.kind}{action.stage}", ()):
                            (held[name] * (rank + 1)).sum().backward()
                            numbers[name] += 1
                            started.append(store.num_overlapped)
                    started.append(store.num_overlapped)
            assert {n: store.of(p).tolist() for n, p in held.items()} == {
                name: [3.0 * count] * 2 for name, count in numbers.items()
            }
            found.append(started)
        return found

    # Buckets leave in one order: never, of 1, norm of 0, of 0, shared.
    wanted = {
        "backwards": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 4, 5, 5],
        "weights last": [0] * 11 + [0, 0, 0] + [0, 0, 0, 0] + [5],
    }[row]
    for first, second in run_ranks(run, 2):
        assert first == second == wanted
