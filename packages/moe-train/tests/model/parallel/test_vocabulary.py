"""Embedding and loss whose rows ranks share out, against torch's on one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_train.model.parallel import PositionCut, TensorParallel, VocabularyShare
from ranktest import run_ranks

ROWS, HIDDEN = 2, 6
# Ranks, rows of the vocabulary, positions: uneven in both, and a rank without positions.
CASES = [(2, 22, 6), (3, 23, 7), (3, 3, 2)]


def inputs(vocabulary: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, S, d], a head [V, d] and labels [B, S], some of them -100."""
    generator = torch.Generator().manual_seed(vocabulary + length)
    hidden = torch.randn(ROWS, length, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (ROWS, length), generator=generator)
    labels[0, 1], labels[1, 0], labels[1, -1] = -100, vocabulary - 1, 0
    return hidden, weight, labels


def share_of(rank: int, size: int, vocabulary: int) -> tuple[VocabularyShare, PositionCut]:
    tp = TensorParallel(rank=rank, size=size, group=dist.group.WORLD)
    return VocabularyShare(size=vocabulary, tp=tp), PositionCut(rank=rank, size=size)


@pytest.mark.parametrize(("size", "vocabulary", "length"), CASES)
def test_loss_and_gradients_are_those_of_all_rows(size: int, vocabulary: int, length: int) -> None:
    """Also of logits that would overflow an exponential, in chunks, and with a head that is fixed.

    What ignored tokens hold is NaN.
    """
    hidden, weight, labels = inputs(vocabulary, length, torch.float64)
    weight *= 300.0
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy(
        (whole[0] @ whole[1].t()).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    (0.3 * expected).backward()
    hidden[0, 1] = torch.nan

    def run(rank: int, _: int) -> list[tuple[float, Tensor, Tensor]]:
        share, cut = share_of(rank, size, vocabulary)
        found = []
        for chunk in (None, 1, 3):
            own = cut.take(hidden).clone().requires_grad_()
            rows = weight[share.rows.start : share.rows.stop].clone().requires_grad_()
            loss = share.loss(own, rows, labels, chunk)
            (0.3 * loss).backward()
            fixed = share.loss(own, rows.detach(), labels, chunk)
            assert torch.equal(torch.autograd.grad(0.3 * fixed, own)[0], own.grad)  # type: ignore[arg-type]
            found.append((loss.item(), own.grad, rows.grad))
        return found  # type: ignore[return-value]

    ranks = run_ranks(run, size)
    for parts in zip(*ranks, strict=True):  # type: ignore[call-overload]
        losses, of_hidden, of_rows = zip(*parts, strict=True)
        assert sum(losses) == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(torch.cat(of_rows), whole[1].grad, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.cat(of_hidden, 1), whole[0].grad, rtol=1e-9, atol=1e-11)


def test_sixteen_bit_logits_are_summed_in_float32_and_without_gradients_too() -> None:
    hidden, weight, labels = inputs(21, 5, torch.bfloat16)
    logits = (hidden @ weight.t()).float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()

    def run(rank: int, _: int) -> list[object]:
        share, cut = share_of(rank, 2, 21)
        rows = weight[share.rows.start : share.rows.stop].clone().requires_grad_()
        loss = share.loss(cut.take(hidden), rows, labels, 2)
        loss.backward()
        with torch.no_grad():
            again = share.loss(cut.take(hidden), rows, labels)
        assert rows.grad is not None
        return [loss.item(), again.item(), loss.dtype, rows.grad.dtype]

    first, second = run_ranks(run, 2)
    for number in (0, 1):
        assert first[number] + second[number] == pytest.approx(expected, rel=1e-6)  # type: ignore[index]
    assert first[2:] == second[2:] == [torch.float32, torch.bfloat16]  # type: ignore[index]


@pytest.mark.parametrize(("size", "vocabulary", "length"), CASES)
def test_embeddings_have_the_bits_and_the_gradients_of_all_rows(
    size: int, vocabulary: int, length: int
) -> None:
    factors, weight, labels = inputs(vocabulary, length, torch.float64)
    ids = labels.clamp(min=0)
    whole = weight.clone().requires_grad_()
    expected = F.embedding(ids, whole)
    (expected * factors).sum().backward()

    def run(rank: int, _: int) -> list[Tensor]:
        share, cut = share_of(rank, size, vocabulary)
        rows = weight[share.rows.start : share.rows.stop].clone().requires_grad_()
        found = share.embedded(ids, rows)
        (found * cut.take(factors)).sum().backward()
        assert rows.grad is not None
        return [found.detach(), rows.grad]

    found, grads = zip(*run_ranks(run, size), strict=True)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(found, 1), expected)
    torch.testing.assert_close(torch.cat(grads), whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [-1, 22, 40])
def test_what_is_no_row_of_the_vocabulary_is_refused_on_every_rank(wrong: int) -> None:
    for rank in range(3):
        share = VocabularyShare(size=22, tp=TensorParallel(rank=rank, size=3))
        rows = torch.zeros(len(share.rows), HIDDEN)
        index, _ = share.own(torch.tensor([3, wrong]))
        with pytest.raises(IndexError):
            F.embedding(index, rows)


def test_every_row_is_of_one_rank() -> None:
    for size, vocabulary in ((1, 5), (3, 8), (4, 4)):
        shares = [
            VocabularyShare(size=vocabulary, tp=TensorParallel(rank=rank, size=size))
            for rank in range(size)
        ]
        assert [row for share in shares for row in share.rows] == list(range(vocabulary))
        for share in shares:
            index, is_elsewhere = share.own(torch.arange(vocabulary))
            assert (~is_elsewhere).nonzero().flatten().tolist() == list(share.rows)
            assert index[~is_elsewhere].tolist() == list(range(len(share.rows)))
