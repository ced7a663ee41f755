import logging

import pytest

from moe_train.report import phases
from moe_train.report.phases import phase


def test_a_phase_says_when_it_begins_and_how_long_it_took_if_that_was_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now_s[0])
    with phase("joining 4 ranks"):
        assert caplog.messages == ["joining 4 ranks"]
        now_s[0] = 0.5
    with phase("loading"):
        now_s[0] = 3.75
    with phase("other ranks say nothing", shown=False):
        now_s[0] = 30.0
    assert caplog.messages == ["joining 4 ranks", "loading", "loading: done in 3.2 s"]


def test_a_phase_that_fails_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyError), phase("loading"):
        raise KeyError
    assert caplog.messages == ["loading"]
