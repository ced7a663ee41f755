"""Ranks that may be lost: what they answer, and how each way to end is told."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_collectives.checking.local_ranks import LocalRanks, Reply
from comm_collectives.errors import CommError


def _add(message: int) -> int:
    total = torch.tensor([message + dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def _end(message: str) -> str:
    if dist.get_rank() == 1:
        if message == "abort":
            os.abort()
        if message == "exit":
            os._exit(3)
        if message == "raise":
            raise KeyError("no such thing")
        if message == "hang":
            time.sleep(60)
    return message


def _where(_: Any) -> str:
    return str(dist.get_backend())


def test_ranks_answer_message_by_message_in_one_group() -> None:
    with LocalRanks(3, _add, limit_s=20) as ranks:
        replies = [[r.value for r in each] for each in ranks.ask([0, 10], limit_s=20)]
        again = [[r.value for r in each] for each in ranks.ask([100], limit_s=20)]
    assert replies == [[3] * 3, [33] * 3]
    assert again == [[303] * 3]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("abort", "was killed by SIGABRT"),
        ("exit", "ended with exit code 3"),
        ("raise", "ended with exit code 1: KeyError: 'no such thing'"),
    ],
)
def test_rank_that_ends_is_lost_and_the_others_have_answered(how: str, told: str) -> None:
    with LocalRanks(2, _end, limit_s=20) as ranks:
        answers = list(ranks.ask(["fine", how, "never asked"], limit_s=20))
    assert [reply.value for reply in answers[0]] == ["fine", "fine"]
    assert answers[1][0] == Reply(value=how)
    assert answers[1][1].died
    assert answers[1][1].lost.startswith(told)
    assert len(answers) == 2


def test_rank_that_hangs_is_given_up_after_the_limit() -> None:
    started = time.monotonic()
    with LocalRanks(2, _end, limit_s=20) as ranks:
        ((first, second),) = ranks.ask(["hang"], limit_s=0.5)
    assert first == Reply(value="hang")
    assert second == Reply(lost="no answer within 0.5 s")
    assert time.monotonic() - started < 30


def test_nothing_is_left_running() -> None:
    with LocalRanks(2, _end, limit_s=20) as ranks:
        pids = [process.pid for process in ranks._processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_shared_memory_backend_can_be_asked_for() -> None:
    with LocalRanks(2, _where, limit_s=20, backend="comm_shm") as ranks:
        ((first, second),) = ranks.ask([None], limit_s=20)
    assert first.value == second.value == "comm_shm"


def test_group_that_cannot_be_made_is_said_at_the_start() -> None:
    with pytest.raises(CommError, match=r"rank \d did not start: ended with exit code 1: .*nccl"):
        LocalRanks(2, _where, limit_s=5, backend="no_nccl")
