"""Who is to blame for what a device does not end, from words alone."""

import pytest

from comm_collectives.call.devices.verdict import Stuck, View, find_culprit
from comm_collectives.errors import CollectiveTimeoutError, MismatchError, PeerFailedError

HERE = Stuck(place=(7, 0), word=1, text="all_reduce(op=sum) at a.py:1", peers=frozenset({1, 2}))
COME = View(queued=(7, 0), stuck=HERE, is_known=True)
BEHIND = View(queued=(5, 0), elsewhere="broadcast(...) in group (4, 6)", is_known=True)
OTHER = View(queued=(7, 0), is_known=True, stuck=Stuck(place=(7, 0), word=2, text="gather() at b"))
LATER = View(queued=(9, 0), is_known=True, stuck=Stuck(place=(9, 0), word=2, text="gather() at b"))


@pytest.mark.parametrize(
    ("views", "gone", "is_late", "kind", "words"),
    [
        ({1: COME, 2: COME}, set(), False, None, ""),
        ({1: COME, 2: BEHIND}, set(), False, None, ""),
        ({1: COME, 2: LATER}, set(), False, None, ""),
        ({1: COME, 2: BEHIND}, {2}, False, PeerFailedError, "lost a peer: rank 6 has ended"),
        ({1: COME, 2: COME}, {0, 9}, False, None, ""),
        ({1: COME, 2: OTHER}, set(), False, MismatchError, "rank 6: gather() at b"),
        (
            {1: COME, 2: BEHIND},
            set(),
            True,
            CollectiveTimeoutError,
            "did not arrive: rank 6 (last in call 5, and waits for broadcast(...) in group (4, 6))",
        ),
        (
            {1: View(), 2: COME},
            set(),
            True,
            CollectiveTimeoutError,
            "did not arrive: rank 5 (its process does not answer",
        ),
        (
            {1: COME.asked(), 2: COME},
            set(),
            True,
            CollectiveTimeoutError,
            "did not arrive: rank 5 (its process does not answer",
        ),
        ({1: COME, 2: LATER}, set(), True, CollectiveTimeoutError, "all its ranks have queued it"),
    ],
)
def test_dead_different_and_absent_ranks_are_told_apart(
    views: dict[int, View], gone: set[int], is_late: bool, kind: type | None, words: str
) -> None:
    found = find_culprit(
        HERE, views=views, gone=gone, is_late=is_late, ranks=(4, 5, 6), limit_s=30.0
    )
    assert (None if found is None else found[0]) is kind
    assert words in ("" if found is None else found[1])


def test_a_transfer_is_not_compared_and_its_peer_alone_is_named() -> None:
    transfer = Stuck(place=(0, 0), word=0, text="send to rank 6 at a.py:1,", peers=frozenset({2}))
    views = {1: View(), 2: View(queued=(3, 0), is_known=True)}
    one = {"views": views, "gone": {1}, "ranks": (4, 5, 6), "limit_s": 30.0}
    assert find_culprit(transfer, is_late=False, **one) is None  # type: ignore[arg-type]
    found = find_culprit(transfer, is_late=True, **one)  # type: ignore[arg-type]
    assert found is not None and found[0] is CollectiveTimeoutError
    assert "did not arrive: rank 6 (last in call 3)" in found[1] and "rank 5" not in found[1]
