import pytest
import torch
import torch.nn.functional as F

from moe_train.model.loss import head_loss


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(12, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(21, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 21, (12,))
    labels[::5] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = inputs(dtype)
    ours = head_loss(hidden, weight, labels)
    theirs = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    expected = torch.autograd.grad(0.3 * theirs, (hidden, weight))
    for mine, other in zip(
        torch.autograd.grad(0.3 * ours, (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    ours = head_loss(hidden, weight, labels)
    logits = F.linear(hidden, weight).float()
    expected = F.cross_entropy(logits, labels, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    ours.backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_huge_logits_do_not_overflow() -> None:
    hidden = torch.full((2, 4), 1e4, requires_grad=True)
    weight = torch.cat((torch.ones(1, 4), -torch.ones(2, 4)))
    loss = head_loss(hidden, weight, torch.tensor([0, 1]))
    assert torch.isfinite(loss) and loss.item() == pytest.approx(8e4)
    loss.backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_no_label_and_no_token_give_zero() -> None:
    hidden, weight, labels = inputs(torch.float32)
    ignored = head_loss(hidden, weight, torch.full_like(labels, -100))
    ignored.backward()
    assert ignored.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert head_loss(hidden[:0], weight, labels[:0]).item() == 0


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = head_loss(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()
