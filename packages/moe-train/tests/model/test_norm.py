import pytest
import torch

from moe_train.model.norm import RMSNorm


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 4, 5), (0, 5), (5,)])
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(5, 1e-3, None, torch.float64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(norm(x), reference(x, norm.weight, 1e-3))
    if x.dim() > 1:
        assert torch.autograd.gradcheck(norm, (x,))
        grad = torch.randn(shape, dtype=torch.float64)
        ours = torch.autograd.grad(norm(x), norm.weight, grad)[0]
        theirs = torch.autograd.grad(reference(x, norm.weight, 1e-3), norm.weight, grad)[0]
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_is_computed_in_float32() -> None:
    norm = RMSNorm(64, 1e-6, None, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    x = (torch.randn(10, 64) * 30).to(torch.bfloat16)
    expected = reference(x, norm.weight, 1e-6).to(torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected, rtol=0.01, atol=0.01)


def test_a_strided_input_is_normed_right() -> None:
    norm = RMSNorm(4, 1e-6, None, torch.float32)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(4, 6).t()
    torch.testing.assert_close(norm(x), reference(x, norm.weight, 1e-6).float())
