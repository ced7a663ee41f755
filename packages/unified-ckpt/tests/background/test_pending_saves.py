import threading

import pytest
import torch

from unified_ckpt.background.pending_saves import Ticket, TicketBook, UploadFuture
from unified_ckpt.errors import SaveError
from unified_ckpt.snapshots.shared_memory import SharedMemory
from unified_ckpt.snapshots.staging import StagingBuffer, StagingLayout


@pytest.fixture(scope="module")
def buffer() -> StagingBuffer:
    return StagingBuffer(SharedMemory.allocate(1, purpose="a test"))


def ticket(number: int, buffer: StagingBuffer) -> Ticket:
    return Ticket(
        number=number,
        layout=StagingLayout((), (), 0),
        buffer=buffer,
        head=(0, 0),
        upload_completion=UploadFuture(),
    )


def test_tickets_are_sent_once_in_the_order_of_their_numbers(buffer: StagingBuffer) -> None:
    book = TicketBook()
    first, second, third = (ticket(number, buffer) for number in (1, 2, 3))
    for each in (first, second, third):
        book.add(each)
    book.submit(second)
    assert book.next_to_send() is None  # the first holds it up
    book.submit(first)
    assert book.next_to_send() is first and book.next_to_send() is second
    assert book.next_to_send() is None and book.running() == [first, second]
    assert book.end(first) and not book.end(first)
    assert book.open_ticket(1) is None and book.open_ticket(2) is second
    assert book.withdraw(third) and not book.withdraw(third)
    assert not book.withdraw(second)  # the saver process has it


def test_what_is_expected_is_waited_for_until_its_outcome_is_there(buffer: StagingBuffer) -> None:
    book = TicketBook()
    copied, submitted, open_ = (ticket(number, buffer) for number in (1, 2, 3))
    for each in (copied, submitted, open_):
        book.add(each)
    book.expect(copied)  # another thread will submit it
    book.submit(submitted)
    assert book.expected() == [copied.upload_completion, submitted.upload_completion]
    assert book.end(submitted)  # its error is being told to the peers
    assert book.expected() == [copied.upload_completion, submitted.upload_completion]
    submitted.upload_completion.set_result(None)
    assert book.expected() == [copied.upload_completion]
    book.submit(copied)
    assert book.expected() == [copied.upload_completion]


def test_a_ticket_that_ended_cannot_be_submitted(buffer: StagingBuffer) -> None:
    book, only = TicketBook(), ticket(1, buffer)
    book.add(only)
    assert book.withdraw(only)
    book.submit(only)
    assert book.next_to_send() is None and book.running() == []


def test_what_a_dead_saver_left_is_redone_in_order_and_once(buffer: StagingBuffer) -> None:
    book = TicketBook()
    tickets = [ticket(number, buffer) for number in (3, 1, 2)]
    for each in tickets:
        book.add(each)
        assert book.end(each, redo=True)
    assert [each.number for each in book.to_redo()] == [1, 2, 3]
    assert book.redone(2) is tickets[2] and book.redone(2) is None
    assert {each.number for each in book.take_redo()} == {1, 3}
    assert book.to_redo() == []


def test_an_error_is_unseen_until_somebody_looks() -> None:
    book, seen, unseen = TicketBook(), UploadFuture(), UploadFuture()
    for number, outcome in enumerate((seen, unseen)):
        book.note_failure(outcome)
        outcome.set_exception(SaveError(f"failure {number}"))
    with pytest.raises(SaveError, match="failure 0"):
        seen.result(1)
    assert str(book.take_unseen()) == "failure 1"
    assert unseen.seen and book.take_unseen() is None


def test_an_error_that_is_just_being_set_is_neither_lost_nor_a_timeout() -> None:
    book, outcome = TicketBook(), UploadFuture()
    book.note_failure(outcome)
    threading.Timer(0.1, outcome.set_exception, [SaveError("late")]).start()
    assert str(book.take_unseen()) == "late"


def test_looking_too_early_is_not_seeing() -> None:
    outcome = UploadFuture()
    with pytest.raises(TimeoutError):
        outcome.exception(0.0)
    assert not outcome.seen
    outcome.set_result(None)
    assert outcome.result(0.0) is None and outcome.seen


def test_views_of_a_buffer_are_made_once_a_layout(buffer: StagingBuffer) -> None:
    layout = StagingLayout((), (), 0)
    assert buffer.views(layout) is buffer.views(layout)
    assert buffer.tensor.dtype == torch.uint8
