"""Reports in the store: who arrived, and a store that does not answer."""

import time

import pytest

from comm_collectives._torch_private import default_store
from comm_collectives.call import reports
from comm_collectives.call.groups.groups import group_state
from comm_collectives.call.reports import Report, ask_peers, has_arrived, post
from ranktest import run_ranks


def _report(number: int, group: str = "g") -> Report:
    return Report(group=group, number=number, name="all_reduce", failed=True)


def test_report_survives_the_store() -> None:
    assert Report.from_json(_report(3).to_json()) == _report(3)


def test_only_this_call_or_a_later_one_of_the_same_group_counts() -> None:
    assert has_arrived(_report(5), _report(5))
    assert has_arrived(_report(6), _report(5))
    assert not has_arrived(_report(4), _report(5))
    assert not has_arrived(_report(5, "other"), _report(5))
    assert not has_arrived(None, _report(5))


def test_peers_that_report_end_the_enquiry_at_once() -> None:
    def fn(rank: int, world_size: int) -> tuple[list[int], float]:
        state = group_state(None)
        started = time.monotonic()
        view = ask_peers(state, _report(1), grace_s=20)
        assert view.problem is None
        return sorted(view.reports), time.monotonic() - started

    results = run_ranks(fn, 3)
    assert [r[0] for r in results] == [[1, 2], [0, 2], [0, 1]]
    assert max(r[1] for r in results) < 10


def test_old_reports_are_kept_but_do_not_count() -> None:
    def fn(rank: int, world_size: int) -> object:
        state = group_state(None)
        if rank == 1:
            post(state, _report(2))
            time.sleep(1.5)
            return None
        time.sleep(0.3)
        return ask_peers(state, _report(7), grace_s=0.3).reports[1].number

    assert run_ranks(fn, 2)[0] == 2


@pytest.mark.parametrize("broken", ["raises", "hangs"])
def test_broken_store_is_said_to_be_broken(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def default_store() -> object:
        if broken == "hangs":
            time.sleep(30)
        raise RuntimeError("connection refused\nwith a long trace")

    monkeypatch.setattr(reports, "default_store", default_store)

    def fn(rank: int, world_size: int) -> str | None:
        state = group_state(None)
        started = time.monotonic()
        view = ask_peers(state, _report(1), grace_s=0.2)
        assert time.monotonic() - started < 5
        return view.problem

    want = {"raises": "connection refused", "hangs": "the store does not answer"}[broken]
    assert run_ranks(fn, 2) == [want] * 2


def test_enquiry_leaves_the_limit_of_the_programs_store_as_it_was() -> None:
    """The store is the default group's: a later `new_group` waits in it for as long as it says."""

    def fn(rank: int, world_size: int) -> None:
        store = default_store()
        before = store.timeout
        assert len(ask_peers(group_state(None), _report(1), grace_s=20).reports) == 1
        assert store.timeout == before

    run_ranks(fn, 2)
