"""Rows that travel with the control exchange arrive as those that have an exchange of their own."""

import pytest
import torch

import comm_collectives as cc
from comm_collectives.base.transport.shm_region import Region
from comm_collectives.call.control.exchange import MailboxExchange
from comm_collectives.call.control.inline_pages import PAGE_BYTES, InlinePages
from comm_collectives.call.control.mailbox import Arrival
from comm_collectives.call.groups import count_wire_bytes
from comm_collectives.call.groups.groups import group_state
from comm_collectives.call.signature.call_signature import INLINE_BYTES
from comm_collectives.errors import CollectiveTimeoutError, CommError, MismatchError
from ranktest import run_ranks

_OFF = cc.AgreementPolicy(every=0)
# Bytes per row around what fits: a frame with one or 2W + 1 counts, a page for all ranks together.
_WIDTHS = (0, 1, 300, INLINE_BYTES - 16, INLINE_BYTES - 15, 4_000, PAGE_BYTES // 4, PAGE_BYTES)


def _rows(rank: int, count: int, width: int) -> torch.Tensor:
    values = torch.arange(count * width) * (rank + 3) + rank
    return (values % 251).to(torch.uint8).view(count, width)


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_of_every_size_arrive_with_and_without_their_own_exchange(world_size: int) -> None:
    def fn(rank: int, size: int) -> None:
        for width in _WIDTHS:
            for uneven in (False, True):
                sent = [(rank + dst) % 3 if uneven else 1 for dst in range(size)]
                received = [(src + rank) % 3 if uneven else 1 for src in range(size)]
                x = _rows(rank, sum(sent), width)
                whole = x.clone()
                cc.set_agreement(_OFF)
                want = cc.all_to_all(x, input_splits=sent, output_splits=received)
                cc.set_agreement(cc.AgreementPolicy())
                for known in (received, None, received, None):
                    got = cc.all_to_all(x, input_splits=sent, output_splits=known)
                    assert torch.equal(got, want), (width, uneven, known)
                assert torch.equal(x, whole)
        assert _page_bytes() == PAGE_BYTES

    run_ranks(fn, world_size, timeout_s=120)


def test_one_rank_with_many_rows_lets_all_have_their_own_exchange() -> None:
    def fn(rank: int, size: int) -> None:
        for large in (100, PAGE_BYTES, 2 * PAGE_BYTES):
            for _ in range(2):  # the first may find no pages yet
                width = large if rank == 1 else 1
                x = torch.full((size * width,), rank, dtype=torch.uint8)
                got = cc.all_to_all(x)
                assert got.tolist() == [0] + [1] * large + [2]

    run_ranks(fn, 3, timeout_s=60)


@pytest.mark.parametrize("op", ["sum", "max", "product"])
def test_sums_of_every_size_are_those_of_a_call_without_an_exchange(op: str) -> None:
    def fn(rank: int, size: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        for length in (0, 1, 48, 49, 1000, PAGE_BYTES // 8, PAGE_BYTES // 8 + 1):
            x = torch.randn(length, 2, generator=generator, dtype=torch.float64)[:, 0]
            cc.set_agreement(_OFF)
            want = cc.all_reduce(x, op=op)
            cc.set_agreement(cc.AgreementPolicy())
            for _ in range(2):
                y = x.clone().requires_grad_()
                got = cc.all_reduce(y, op=op)
                torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
                got.sum().backward()
                assert y.grad is not None and y.grad.shape == x.shape
        assert _page_bytes() == PAGE_BYTES

    run_ranks(fn, 2, timeout_s=120)


def test_drop_in_gets_rows_of_every_size_into_any_output() -> None:
    from comm_collectives.collectives.drop_in import torch_order

    def fn(rank: int, size: int) -> None:
        for width in (1, 50, 5_000, 400_000):
            for _ in range(2):
                x = torch.arange(size * width, dtype=torch.int32).view(size, width) + 7 * rank
                wide = torch.full((size, 2 * width), -1, dtype=torch.int32)
                torch_order.all_to_all_single(wide[:, ::2], x)
                want = torch.stack(
                    [torch.arange(width) + rank * width + 7 * src for src in range(size)]
                )
                assert torch.equal(wide[:, ::2], want.int())
                assert bool((wide[:, 1::2] == -1).all())

    run_ranks(fn, 2, timeout_s=60)


def test_inline_rows_are_counted_as_those_that_are_not() -> None:
    def fn(rank: int, size: int) -> None:
        for width in (2, 2_000, 2 * PAGE_BYTES):
            for _ in range(2):
                with count_wire_bytes() as counted:
                    cc.all_to_all(torch.zeros(size, width, dtype=torch.uint8))
                assert counted.by_call["all_to_all"] == (width,) * size

    run_ranks(fn, 2, timeout_s=60)


def test_page_that_was_written_over_is_an_error_and_no_data() -> None:
    """A rank gave a control exchange up while a peer still read its page of the one before."""

    def fn(rank: int, size: int) -> None:
        x = torch.full((4_000,), float(rank))
        for _ in range(2):
            cc.all_reduce(x)
        control = group_state(None).control
        assert isinstance(control, MailboxExchange)
        waiter = _Waiter()
        page = torch.full((8,), rank + 1, dtype=torch.uint8)
        control.meet(b"first", None, waiter, page)
        assert control.read(lambda pages: pages[:, 0].tolist(), waiter) == [1, 2]
        number = control._number
        torch.distributed.barrier()  # until then the peer may still look at the heads
        if rank == 0:
            control.mailbox.post(number + 1, b"", None)
            control.mailbox.post(number + 2, b"", None)
            torch.distributed.barrier()
        else:
            torch.distributed.barrier()
            with pytest.raises(_NotAllHereError, match=r"withdrawn=\(0,\)"):
                control.read(lambda pages: pages.clone(), waiter)
        torch.distributed.barrier()

    run_ranks(fn, 2, timeout_s=60)


def test_a_group_without_room_for_pages_does_without() -> None:
    def fn(rank: int, size: int) -> None:
        def all_gather(text: bytes) -> list[bytes]:
            told: list[bytes] = [b""] * size
            torch.distributed.all_gather_object(told, text)
            return told

        spare = 1 << 60
        assert Region.open(rank, size, 4096, all_gather, spare_bytes=spare) is None
        pages = InlinePages.open(rank, size, all_gather)
        assert pages is not None and pages.page_bytes == PAGE_BYTES

    run_ranks(fn, 2, timeout_s=60)


def test_shapes_that_differ_are_found_before_any_rank_reads_a_page() -> None:
    def fn(rank: int, size: int) -> None:
        for _ in range(2):
            cc.all_reduce(torch.ones(4_000))
        with pytest.raises(MismatchError, match="shape"):
            cc.all_reduce(torch.ones(4_000 + rank))
        with pytest.raises(MismatchError, match="input_splits of rank"):
            cc.all_to_all(torch.ones(8_000), input_splits=[4_000] * 2, output_splits=[4_000, 3_999])
        assert cc.all_reduce(torch.ones(4_000)).sum() == 8_000

    run_ranks(fn, 2, timeout_s=60)


def test_late_rank_is_named_and_the_next_pages_are_right() -> None:
    def fn(rank: int, size: int) -> None:
        import time

        for _ in range(2):
            cc.all_reduce(torch.ones(4_000))
        if rank == 1:
            time.sleep(1.5)
        with pytest.raises(CollectiveTimeoutError, match="rank"):
            cc.all_reduce(torch.ones(4_000), timeout_s=0.5)
        for step in range(4):
            assert cc.all_reduce(torch.full((4_000,), float(step + rank)))[-1] == 2 * step + 1

    run_ranks(fn, 2, timeout_s=60)


def _page_bytes() -> int:
    control = group_state(None).control
    assert control is not None
    return control.page_bytes


class _NotAllHereError(CommError):
    pass


class _Waiter:
    limit_s = 10.0

    def run(self, start: object, *, on_cpu: bool) -> None:
        raise NotImplementedError

    def not_all_here(self, arrival: Arrival) -> Exception:
        return _NotAllHereError(str(arrival))
