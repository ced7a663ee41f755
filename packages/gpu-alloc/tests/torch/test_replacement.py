"""torch's tensors on our allocator, with torch's own code, on a stub of CUDA."""

from collections.abc import Callable
from typing import Any

Facts = Callable[[str], dict[str, Any]]
MIB = 1 << 20


def test_every_tensor_lies_in_our_memory(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("replace")
    assert facts["pointer"] > 0
    assert facts["live_in_snapshot"] == sorted(facts["expected_live"])


def test_an_out_of_memory_is_an_exception_and_its_report_is_kept(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("replace")
    assert facts["out_of_memory"] == "RuntimeError: std::bad_alloc"
    assert facts["report"].startswith("out of memory: 8.00 GiB")
    assert "the source has no room for 8.00 GiB" in facts["report"]


def test_a_tensor_that_another_stream_used_is_taken_back(facts_on_stub: Facts) -> None:
    assert facts_on_stub("replace")["after_free"] == 4096


def test_an_arena_has_one_set_of_settings(facts_on_stub: Facts) -> None:
    assert "a process has one arena" in facts_on_stub("replace")["other_settings"]


def test_threads_allocate_free_read_and_run_backwards_without_a_hang(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("replace")
    assert facts["threads"]["hung"] == []
    assert facts["threads"]["failures"] == []
    assert min(facts["threads"]["rounds"].values()) > 0
    assert facts["problems"] == []


def test_pages_of_freed_tensors_serve_a_larger_one(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("pages")
    assert facts["used_by_8"] == 800 * MIB
    assert facts["overlap"] == []
    assert facts["used_with_large"] == facts["reserved"] <= 1024 * MIB
    assert "bad_alloc" in facts["out_of_memory"]


def test_pages_are_given_back_and_threads_go_on(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("pages")
    assert facts["threads"]["hung"] == []
    assert facts["threads"]["failures"] == []
    assert facts["problems"] == []
    allocated, reserved = facts["held"]
    assert allocated <= MIB, "what backward passes keep"
    assert facts["used_at_the_end"] == reserved <= 4 * MIB


def test_asking_for_statistics_takes_no_memory(facts_on_stub: Facts) -> None:
    stats, devices = facts_on_stub("replace")["unused"]
    assert devices == []
    assert set(stats) == set(facts_on_stub("replace")["stats"])
    assert set(stats.values()) == {0}
