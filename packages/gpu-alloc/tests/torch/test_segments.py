"""torch's caching allocator over segments of ours, with torch's own code, on a stub of CUDA."""

from collections.abc import Callable
from typing import Any

Facts = Callable[[str], dict[str, Any]]
MIB = 1 << 20


def test_torchs_statistics_and_snapshots_go_on_working(facts_on_stub: Facts) -> None:
    facts = facts_on_stub("segments")
    assert facts["allocated"] == 30 * MIB
    assert facts["reserved"] == 30 * MIB
    [[address, size]] = facts["segments"]
    assert (address, size) == (facts["pointer"], 30 * MIB)


def test_an_out_of_memory_is_torchs_own_error(facts_on_stub: Facts) -> None:
    assert facts_on_stub("segments")["out_of_memory"] == "OutOfMemoryError"


def test_threads_in_the_pool_do_not_hang_while_statistics_are_read(facts_on_stub: Facts) -> None:
    threads = facts_on_stub("segments")["threads"]
    assert threads["hung"] == []
    assert threads["failures"] == []
    assert min(threads["rounds"].values()) > 0
