"""Random programs under random faults; and that the fuzzer finds what is broken on purpose."""

import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from comm_collectives.call import calls
from comm_collectives.call.agreement.agreement import Comparison
from comm_collectives.errors import CommError
from comm_collectives.simulation import run as simulation
from comm_collectives.simulation.faults.schedule import FaultSchedule, ZeroTokens
from comm_collectives.simulation.fuzz import cases as fuzz_cases
from comm_collectives.simulation.fuzz.cases import Case, Draw
from comm_collectives.simulation.fuzz.fuzzing import FuzzReport, fuzz
from comm_collectives.simulation.fuzz.trial import KINDS, Disagreement, Experts
from comm_collectives.simulation.scheduler import SimulationStuckError


def test_random_schedules_end_right_everywhere_or_alike_everywhere() -> None:
    seed = time.time_ns() % 1_000_000_000
    print(f"fuzz(100, seed={seed})")
    report = fuzz(100, seed=seed)
    assert report.num_right == report.num_schedules == 100, str(report)
    # Not only failures, which would be alike as well.
    assert report.endings["finished"] > 15
    assert report.num_ranks > 1000


def test_the_schedule_whose_ranks_draw_the_same_chance_ends() -> None:
    """Three of them wait for one moment with the same 32 bits: once it stopped the simulation."""
    assert fuzz(1, seed=232347275).num_right == 1


def test_same_seed_gives_the_same_trial() -> None:
    first, second = (fuzz(20, seed=5, ranks=(2, 9)) for _ in range(2))
    assert first.endings == second.endings
    assert first.num_ranks == second.num_ranks


def test_any_integer_is_a_seed_and_nothing_else() -> None:
    for seed in (2**70, -(2**70)):
        assert fuzz(1, seed=seed, ranks=(2, 4)).num_right == 1
    with pytest.raises(TypeError, match=r"seed=1\.5 is a float; give an integer"):
        fuzz(1, seed=1.5)  # type: ignore[arg-type]


def _canary(ranks: tuple[int, int] = (4, 12)) -> FuzzReport:
    """Fuzz a package that somebody has broken."""
    return fuzz(400, seed=1, ranks=ranks, max_violations=1)


def test_canary_an_early_return_without_rows_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = fuzz_cases.all_to_all

    def hasty(x: torch.Tensor, **options: object) -> torch.Tensor:
        return right(x, **options) if len(x) else x  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(fuzz_cases, "all_to_all", hasty)
    (violation,) = _canary().violations
    assert violation.names == ("all_to_all",)
    assert violation.scenario.num_ranks <= 4
    assert len(violation.scenario.faults) <= 1
    assert all(isinstance(fault, ZeroTokens) for fault in violation.scenario.faults.faults)
    assert f"seed {violation.seed}" in str(violation)


def test_canary_agreement_switched_off_is_found_and_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "compare", lambda words, own: Comparison())
    (violation,) = _canary().violations
    assert violation.scenario.num_ranks <= 4
    assert len(violation.scenario.calls) <= 2
    assert len(violation.scenario.faults) <= 2


def test_canary_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz_cases.all_reduce

    def careless(x: torch.Tensor, **options: object) -> torch.Tensor:
        y = right(x, **options)  # type: ignore[call-overload]
        return y + (x.numel() == 200) if isinstance(y, torch.Tensor) else y

    monkeypatch.setattr(fuzz_cases, "all_reduce", careless)
    (violation,) = _canary().violations
    assert "is right" in violation.reason
    assert violation.scenario.faults == FaultSchedule()
    assert violation.scenario.num_ranks == 2


def test_canary_errors_of_two_kinds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_view(call: calls.Call, error: CommError) -> CommError:
        return error

    monkeypatch.setattr(calls.Call, "in_class_of_first", own_view)
    (violation,) = _canary().violations
    assert ", but " in violation.reason


def test_stuck_trial_names_its_replay_and_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never = threading.Event()
    monkeypatch.setattr(simulation, "_REAL_LIMIT_S", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fuzz_cases, "broadcast", lambda *a, **k: never.wait())
    with pytest.raises(
        SimulationStuckError, match=r"fuzz\(1, seed=(\d+), ranks=\(2, 4\)\)"
    ) as caught:
        fuzz(50, seed=1, ranks=(2, 4))
    never.set()
    (saved,) = tmp_path.iterdir()
    for text in (str(caught.value), saved.read_text()):
        assert "never.wait()" in text and "FaultSchedule(" in text


@pytest.mark.parametrize("kind", [*KINDS, Experts, Disagreement])
@pytest.mark.parametrize("size", [1, 5])
def test_cases_expect_what_one_rank_alone_and_empty_ranks_get(kind: type[Case], size: int) -> None:
    """The oracle is deterministic, and covers every rank."""
    empty = [rank % 2 == 0 for rank in range(size)]
    for seed in range(8):
        first, second = (
            kind(Draw(seed=seed, size=size, has_tokens=empty)).expected()  # type: ignore[call-arg]
            for _ in range(2)
        )
        assert len(first) == size
        for mine, again in zip(first, second, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.parametrize(("num_schedules", "ranks"), [(0, (2, 4)), (1, (1, 4)), (1, (8, 4))])
def test_numbers_are_checked(num_schedules: int, ranks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="give at least one trial"):
        fuzz(num_schedules, seed=1, ranks=ranks)
