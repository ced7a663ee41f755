"""Every kind of transfers ends as it must, and one that ends otherwise is found."""

import pytest

from comm_collectives.call.pairs.questions import Questions
from comm_collectives.simulation.faults.schedule import FaultSchedule
from comm_collectives.simulation.fuzz import trial
from comm_collectives.simulation.fuzz.cases import Draw
from comm_collectives.simulation.fuzz.fuzzing import fuzz
from comm_collectives.simulation.fuzz.transfers import _WAYS, Transfers
from comm_collectives.simulation.fuzz.trial import judge
from comm_collectives.simulation.run import simulate


def _drawn(way: str, size: int) -> list[Transfers]:
    """The first three of this way."""
    found: list[Transfers] = []
    seed = 0
    while len(found) < 3:
        case = Transfers(Draw(seed=seed, size=size, has_tokens=[True] * size))
        found += [case] if case.name == way else []
        seed += 1
    return found


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("size", [2, 6])
def test_transfers_end_as_they_must_on_every_rank_and_the_group_goes_on(
    way: str, size: int
) -> None:
    cases = _drawn(way, size)
    result = simulate([case.call for case in cases], size, shared_memory=size == 2)
    assert judge(result, cases, FaultSchedule()) == ("finished", None)


@pytest.mark.parametrize(
    ("name", "lenient"),
    [
        ("ask", lambda *_: None),  # nobody hears of a circle
        ("pass_on", lambda *_: None),  # nobody knows for what others wait
        ("_owes", lambda *_: True),  # a rank that is late is taken for one that waits
    ],
)
def test_canary_ranks_that_ask_wrongly_are_found(
    name: str, lenient: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Questions, name, lenient)
    monkeypatch.setattr(trial, "_WITH_TRANSFERS", 1.0)
    (violation,) = fuzz(300, seed=1, ranks=(2, 4), max_violations=1).violations
    assert set(violation.names) & set(_WAYS), violation
