"""Every way in which ranks disagree ends as it must, and one that ends otherwise is found."""

import pytest
import torch

from comm_collectives.simulation.faults.schedule import FaultSchedule
from comm_collectives.simulation.fuzz import disagreements
from comm_collectives.simulation.fuzz.cases import Case, Draw, Rows
from comm_collectives.simulation.fuzz.disagreements import _WAYS, Disagreement
from comm_collectives.simulation.fuzz.fuzzing import fuzz
from comm_collectives.simulation.fuzz.trial import judge
from comm_collectives.simulation.run import simulate


def _drawn(way: str, size: int) -> list[Disagreement]:
    """The first three of this way, with other calls each."""
    found: list[Disagreement] = []
    seed = 0
    while len(found) < 3:
        case = Disagreement(Draw(seed=seed, size=size, has_tokens=[True] * size))
        found += [case] if case.name == way else []
        seed += 1
    return found


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("size", [2, 5])
def test_disagreement_is_the_right_error_on_every_rank_and_the_group_goes_on(
    way: str, size: int
) -> None:
    cases = _drawn(way, size)
    result = simulate([case.call for case in cases], size, shared_memory=size == 2)
    assert judge(result, cases, FaultSchedule()) == ("finished", None)


@pytest.mark.filterwarnings("ignore::comm_collectives.errors.LostGradientWarning")
@pytest.mark.parametrize("way", list(_WAYS))
def test_disagreement_is_the_right_error_after_the_odd_rank_has_dropped_a_graph(way: str) -> None:
    rows = Rows(Draw(seed=0, size=5, has_tokens=[True] * 5))
    rows._grad, rows._used = True, torch.ones(5, dtype=torch.bool)
    case = _drawn(way, 5)[0]
    rows._used[case._odd] = False
    cases: list[Case] = [rows, case]
    result = simulate([each.call for each in cases], 5, shared_memory=False)
    assert judge(result, cases, FaultSchedule()) == ("finished", None)


def test_canary_a_combine_that_takes_any_handle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = disagreements.combine

    def lenient(y: torch.Tensor, handle: object) -> torch.Tensor:
        return y if y.requires_grad is False else right(y, handle)  # type: ignore[arg-type]

    monkeypatch.setattr(disagreements, "combine", lenient)
    (violation,) = fuzz(3000, seed=1, ranks=(2, 4), max_violations=1).violations
    assert violation.names == ("another handle",)
    assert "nothing on rank" in violation.reason or "is right" in violation.reason
