"""The first call that differs is found again among those not compared."""

from comm_collectives.call.agreement.history import History
from comm_collectives.call.signature.call_signature import Argument, CallSignature
from comm_collectives.call.signature.callsite import CallSite


def _head(number: int, op: int) -> CallSignature:
    site = CallSite("train.py:3", 1)
    return CallSignature(
        name="all_reduce", number=number, site=site, arguments=(Argument("op", op),)
    )


def _histories(*ops: list[int]) -> list[History]:
    histories = [History() for _ in ops]
    for history, own in zip(histories, ops, strict=True):
        for number, op in enumerate(own, start=1):
            history.add(number, _head(number, op))
    return histories


def _tell_all(histories: list[History]) -> list[str]:
    told: list[bytes] = []
    for history in histories:  # first only collect what each would tell
        history.first_difference(lambda text: told.append(text) or [text], "now")
    return [history.first_difference(lambda _: told, "now") for history in histories]


def test_rolling_hash_is_that_of_all_calls() -> None:
    same, other, again = _histories([0, 1, 0], [0, 2, 0], [0, 1, 0])
    assert same.rolling == again.rolling != other.rolling


def test_first_difference_is_named_by_each_rank() -> None:
    first, second = _tell_all(_histories([0, 1, 0], [0, 2, 0]))
    assert first == "call 2 was all_reduce(op=1) at train.py:3"
    assert second == "call 2 was all_reduce(op=2) at train.py:3"


def test_difference_before_the_kept_calls_is_said_to_be_older() -> None:
    texts = _tell_all(_histories([1, *[0] * 100], [2, *[0] * 100]))
    # Every kept hash differs, so the oldest kept call is named.
    assert texts[0].startswith("call 38 was")


def test_cleared_history_starts_anew() -> None:
    history, fresh = _histories([1, 2], [])
    history.clear()
    assert history.rolling == fresh.rolling
