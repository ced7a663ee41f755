import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig
from moe_pipeline.experts import Experts, choose_implementation

ALL = ["loop", "fused", "grouped_mm"]


def make(implementation, experts=6, hidden=16, intermediate=8, dtype=torch.float32, device="cpu"):
    config = MoEConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=1,
        experts_implementation=implementation,
        initializer_range=0.3,
    )
    return Experts(config, dtype=dtype, device=device)


def reference(experts, x, counts, weights):
    """Row by row, without any grouping."""
    out, row = [], 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            both = experts.gate_up_proj[expert] @ x[row]
            gate, up = both[: len(both) // 2], both[len(both) // 2 :]
            out.append(weights[row] * (experts.down_proj[expert] @ (F.silu(gate) * up)))
            row += 1
    return torch.stack(out) if out else x * 0


def results(function, experts, x, counts, weights, seed):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = function(x, counts, weights)
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    inputs = [x, weights, experts.gate_up_proj, experts.down_proj]
    grads = torch.autograd.grad((y * factors).sum(), inputs, allow_unused=True)
    zeros = [torch.zeros_like(i) for i in inputs]
    return [y, *(z if g is None else g for g, z in zip(grads, zeros, strict=True))]


@pytest.mark.parametrize("counts", [(3, 0, 5, 1, 0, 2), (0, 0, 0, 0, 0, 9), (0,) * 6, (1,) * 6])
@pytest.mark.parametrize("implementation", ALL)
def test_values_and_gradients_equal_the_row_by_row_reference(seed, implementation, counts):
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    experts = make(implementation, dtype=dtype)
    rows = sum(counts)
    x, weights = torch.randn(rows, 16, dtype=dtype), torch.rand(rows, dtype=dtype)
    ours = results(experts, experts, x, counts, weights, seed)
    theirs = results(lambda *a: reference(experts, *a), experts, x, counts, weights, seed)
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    assert_close(ours, theirs, atol=limit, rtol=limit)


@pytest.mark.parametrize("implementation", ["fused", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks_agree_with_the_loop(seed, implementation, dtype):
    experts = make(implementation, experts=10, hidden=32, intermediate=512, dtype=dtype)
    loop = make("loop", experts=10, hidden=32, intermediate=512, dtype=dtype)
    loop.load_state_dict(experts.state_dict())
    counts = (70, 0, 300, 1, 60, 60, 60, 0, 129, 0)
    x, weights = torch.randn(sum(counts), 32).to(dtype), torch.rand(sum(counts)).to(dtype)
    ours = results(experts, experts, x, counts, weights, seed)
    theirs = results(loop, loop, x, counts, weights, seed)
    for got, expected in zip(ours, theirs, strict=True):
        scale = expected.float().abs().max().item()
        limit = scale * (2e-5 if dtype == torch.float32 else 3e-2)
        assert_close(got, expected, atol=limit, rtol=0)


@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_gradcheck(seed, implementation):
    experts = make(implementation, experts=3, hidden=4, intermediate=3, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)

    def function(x, weights, gate_up, down):
        return torch.func.functional_call(
            experts, {"gate_up_proj": gate_up, "down_proj": down}, (x, (2, 0, 3), weights)
        )

    parameters = (experts.gate_up_proj, experts.down_proj)
    assert torch.autograd.gradcheck(function, (x, weights, *parameters))
    if implementation == "loop":
        assert torch.autograd.gradgradcheck(function, (x, weights, *parameters))


@pytest.mark.parametrize("implementation", ALL)
def test_expanded_gradients_and_odd_strides_work(seed, implementation):
    experts = make(implementation)
    wide = torch.randn(16, 9).t()
    weights = torch.rand(18)[::2]
    assert not wide.is_contiguous()
    experts(wide, (2, 0, 3, 4, 0, 0), weights).sum().backward()
    expected = make("loop")
    expected.load_state_dict(experts.state_dict())
    expected(wide.contiguous(), (2, 0, 3, 4, 0, 0), weights.contiguous()).sum().backward()
    assert_close(experts.gate_up_proj.grad, expected.gate_up_proj.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ALL)
def test_gradients_accumulate_over_calls(seed, implementation):
    experts = make(implementation)
    x, weights = torch.randn(6, 16), torch.rand(6)
    counts = (1, 0, 2, 3, 0, 0)
    experts(x, counts, weights).square().sum().backward()
    once = experts.down_proj.grad.clone()
    experts(x, counts, weights).square().sum().backward()
    assert_close(experts.down_proj.grad, 2 * once)


@pytest.mark.parametrize("implementation", ALL)
def test_frozen_experts_still_pass_gradients_to_rows_and_weights(seed, implementation):
    experts = make(implementation).requires_grad_(False)
    x, weights = torch.randn(4, 16, requires_grad=True), torch.rand(4, requires_grad=True)
    experts(x, (4, 0, 0, 0, 0, 0), weights).sum().backward()
    assert x.grad is not None and weights.grad is not None
    assert experts.gate_up_proj.grad is None


def test_auto_names_an_implementation_that_takes_the_weights():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        experts = make("auto", hidden=15, dtype=dtype)
        assert choose_implementation(experts.gate_up_proj, experts.down_proj) == "fused"


@pytest.mark.parametrize(
    ("counts", "shape", "words"),
    [
        ((1, 2), (3, 16), "must hold 6 counts that sum to the 3 rows"),
        ((1, 0, 0, 0, 0, 0), (3, 16), "must hold 6 counts that sum to the 3 rows"),
        ((4, -1, 0, 0, 0, 0), (3, 16), "must hold 6 counts"),
        ((3, 0, 0, 0, 0, 0), (3, 8), r"expect \[rows, 16\], got shape \(3, 8\)"),
    ],
)
def test_counts_and_rows_that_do_not_fit_are_refused(counts, shape, words):
    with pytest.raises(ValueError, match=words):
        make("fused")(torch.zeros(shape), counts, torch.zeros(3))


def test_weights_and_dtypes_that_do_not_fit_are_refused():
    counts = (3, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="one weight for each of the 3 rows"):
        make("fused")(torch.zeros(3, 16), counts, torch.zeros(3, 1))
    with pytest.raises(
        TypeError, match=r"experts hold torch\.float32 and got rows in torch\.float64"
    ):
        make("fused")(torch.zeros(3, 16, dtype=torch.float64), counts, torch.zeros(3))


def test_grouped_mm_says_which_sizes_and_dtypes_it_cannot_take():
    counts = (3, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="has no fp64; choose 'fused' or 'loop'"):
        make("grouped_mm", dtype=torch.float64)(
            torch.zeros(3, 16, dtype=torch.float64), counts, torch.zeros(3)
        )
    with pytest.raises(ValueError, match=r"hidden_size=15 in torch\.float32 has 60"):
        make("grouped_mm", hidden=15)(torch.zeros(3, 15), counts, torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ALL)
def test_gpu_bf16_agrees_with_the_loop_in_fp32(seed, implementation):
    sizes = dict(experts=8, hidden=128, intermediate=64, device="cuda")
    experts = make(implementation, dtype=torch.bfloat16, **sizes)
    loop = make("loop", dtype=torch.float32, **sizes)
    loop.load_state_dict(experts.state_dict())
    counts = (70, 0, 300, 1, 60, 0, 13, 129)
    x = torch.randn(sum(counts), 128, device="cuda").bfloat16()
    weights = torch.rand(sum(counts), device="cuda")
    experts(x, counts, weights).float().square().sum().backward()
    loop(x.float(), counts, weights).square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        got, expected = getattr(experts, name).grad.float(), getattr(loop, name).grad
        assert (got - expected).norm() < 2e-2 * expected.norm()
        assert not got[[1, 5]].any()
