import os
import signal
import threading
from pathlib import Path

import pytest

from moe_train.launch.rank import RankContext, RankJobError, run_rank, watch_stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_only_noted_however_often_they_come(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    context = watch_stop_signals()
    try:
        assert not context.stop_requested
        for sent in (number, signal.SIGTERM, number):
            os.kill(os.getpid(), sent)
        assert context.stop_requested
        assert context.signals.seen == {number, signal.SIGTERM}
    finally:
        context.signals.close()
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_context_of_its_own_watches_nothing() -> None:
    context = RankContext()
    assert (context.stop_requested, context.step) == (False, 0)


def test_signals_are_refused_outside_of_the_main_thread() -> None:
    errors: list[Exception] = []

    def watch() -> None:
        try:
            watch_stop_signals()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_what_a_job_raises_is_told_with_rank_and_finished_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_failing_job.py").write_text(
        "def run(argv, context):\n    context.step = 4\n    raise KeyError(argv[0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RankJobError, match="rank 3, step 4: KeyError: 'lost'") as raised:
        run_rank("a_failing_job", ["lost"], RankContext())
    assert (raised.value.error.rank, raised.value.error.step) == (3, 4)
    assert "a_failing_job.py" in raised.value.error.text
