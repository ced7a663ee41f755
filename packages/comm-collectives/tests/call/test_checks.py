"""A mistake in a call's arguments is raised on every rank; anything else where it happened."""

import pytest
import torch

import comm_collectives as cc
from comm_collectives.call.checks import Checks
from comm_collectives.call.groups.groups import group_state
from comm_collectives.errors import RefusedError, RefusedTypeError
from ranktest import run_ranks


def test_first_mistake_of_a_rank_is_raised_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        texts = []
        for kind, wanted in ((ValueError, RefusedError), (TypeError, RefusedTypeError)):
            with Checks(kind("too late") if rank == 1 else None) as checks:
                if rank == 0:
                    raise kind("too small")
            with pytest.raises(wanted) as caught:
                checks.call(group_state(None), "test")
            texts.append(str(caught.value).partition("refused: ")[2])
        assert cc.all_reduce(torch.ones(1)).item() == world_size
        return texts

    first, second = run_ranks(fn, 2)
    assert first == second
    assert "rank 0: too small" in first[0] and "rank 1: too late" in first[0]


def test_other_exceptions_leave_the_block() -> None:
    with pytest.raises(KeyError), Checks():
        raise KeyError("x")
