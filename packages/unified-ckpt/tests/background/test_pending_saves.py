import threading

import pytest
import torch

from unified_ckpt.background.pending_saves import PendingSave, SaveQueue, UploadFuture
from unified_ckpt.errors import SaveError
from unified_ckpt.snapshots.shared_memory import SharedMemory
from unified_ckpt.snapshots.staging import StagingBuffer, StagingLayout


@pytest.fixture(scope="module")
def buffer() -> StagingBuffer:
    return StagingBuffer(SharedMemory.allocate(1, purpose="a test"))


def pending(number: int, buffer: StagingBuffer) -> PendingSave:
    return PendingSave(
        number=number,
        layout=StagingLayout((), (), 0),
        buffer=buffer,
        head=(0, 0),
        upload_completion=UploadFuture(),
    )


def test_saves_are_sent_once_in_the_order_of_their_numbers(buffer: StagingBuffer) -> None:
    queue = SaveQueue()
    first, second, third = (pending(number, buffer) for number in (1, 2, 3))
    for each in (first, second, third):
        queue.add(each)
    queue.submit(second)
    assert queue.next_to_send() is None  # the first holds it up
    queue.submit(first)
    assert queue.next_to_send() is first and queue.next_to_send() is second
    assert queue.next_to_send() is None and queue.running() == [first, second]
    assert queue.end(first) and not queue.end(first)
    assert queue.open_save(1) is None and queue.open_save(2) is second
    assert queue.withdraw(third) and not queue.withdraw(third)
    assert not queue.withdraw(second)  # the saver process has it


def test_what_is_expected_is_waited_for_until_its_outcome_is_there(buffer: StagingBuffer) -> None:
    queue = SaveQueue()
    copied, submitted, open_ = (pending(number, buffer) for number in (1, 2, 3))
    for each in (copied, submitted, open_):
        queue.add(each)
    queue.expect(copied)  # another thread will submit it
    queue.submit(submitted)
    assert queue.expected() == [copied.upload_completion, submitted.upload_completion]
    assert queue.end(submitted)  # its error is being told to the peers
    assert queue.expected() == [copied.upload_completion, submitted.upload_completion]
    submitted.upload_completion.set_result(None)
    assert queue.expected() == [copied.upload_completion]
    queue.submit(copied)
    assert queue.expected() == [copied.upload_completion]


def test_a_save_that_ended_cannot_be_submitted(buffer: StagingBuffer) -> None:
    queue, only = SaveQueue(), pending(1, buffer)
    queue.add(only)
    assert queue.withdraw(only)
    queue.submit(only)
    assert queue.next_to_send() is None and queue.running() == []


def test_what_a_dead_saver_left_is_redone_in_order_and_once(buffer: StagingBuffer) -> None:
    queue = SaveQueue()
    pending_saves = [pending(number, buffer) for number in (3, 1, 2)]
    for each in pending_saves:
        queue.add(each)
        assert queue.end(each, replay=True)
    assert [each.number for each in queue.to_replay()] == [1, 2, 3]
    assert queue.replayed(2) is pending_saves[2] and queue.replayed(2) is None
    assert {each.number for each in queue.take_replays()} == {1, 3}
    assert queue.to_replay() == []


def test_an_error_is_unseen_until_somebody_looks() -> None:
    queue, seen, unseen = SaveQueue(), UploadFuture(), UploadFuture()
    for number, outcome in enumerate((seen, unseen)):
        queue.note_failure(outcome)
        outcome.set_exception(SaveError(f"failure {number}"))
    with pytest.raises(SaveError, match="failure 0"):
        seen.result(1)
    assert str(queue.take_unseen()) == "failure 1"
    assert unseen.seen and queue.take_unseen() is None


def test_an_error_that_is_just_being_set_is_neither_lost_nor_a_timeout() -> None:
    queue, outcome = SaveQueue(), UploadFuture()
    queue.note_failure(outcome)
    threading.Timer(0.1, outcome.set_exception, [SaveError("late")]).start()
    assert str(queue.take_unseen()) == "late"


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


def test_a_save_is_not_cancelled_by_who_waits_no_longer() -> None:
    outcome = UploadFuture()
    assert not outcome.cancel() and not outcome.done()
    outcome.set_result(None)
    assert outcome.result() is None
