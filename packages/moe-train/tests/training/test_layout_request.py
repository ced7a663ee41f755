"""The file by which a running job is asked for another layout."""

import logging
from pathlib import Path

import pytest

from moe_train.training.layout_request import LayoutRequests
from ranktest import run_ranks


def test_all_ranks_take_what_the_first_one_finds_and_no_rank_takes_nonsense(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> list[object]:
        requests = LayoutRequests(tmp_path, rank == 0)
        found: list[object] = []
        for text in [
            '{"pp": 2, "dp": 1, "ep": 4, "cp": 2, "tp": 2, "etp": 1}',
            '{"pp": 1, "dp": 1, "ep": 2, "cp": 1, "tp": 1, "etp": 1, "experts": "3,5"}',
            '{"pp": 1, "dp": 1, "ep": 2, "cp": 1, "tp": 1, "etp": 1, "experts": 3}',
            "{",
            '{"pp": 2}',
            '{"pp": 0, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "etp": 1}',
        ]:
            if rank == 0:
                (tmp_path / "relayout.json").write_text(text)
                assert requests.is_waiting()
            found.append(requests.take())
            assert not requests.is_waiting()
        return found

    taken = [((2, 1, 4, 2, 2, 1), ""), ((1, 1, 2, 1, 1, 1), "3,5")]
    assert run_ranks(fn, 2) == [[*taken, None, None, None, None]] * 2


def test_a_request_is_seen_by_the_first_rank_and_forgotten_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LayoutRequests(tmp_path).ask((1, 2, 1, 1, 1, 1))
    first, other = LayoutRequests(tmp_path, True), LayoutRequests(tmp_path, False)
    assert first.is_waiting() and not other.is_waiting()
    other.forget()
    with caplog.at_level(logging.WARNING):
        first.forget()
        first.forget()
    assert not first.is_waiting()
    assert caplog.messages == ["warning: relayout.json was asked of an earlier job; it is removed"]
