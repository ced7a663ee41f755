"""Exceptions are kept, except those that must pass."""

import pytest

from comm_collectives.call.handles.caught import Caught


def test_error_is_kept_with_its_traceback_and_the_block_ends() -> None:
    with Caught() as caught:
        raise KeyboardInterrupt("stop")
    assert isinstance(caught.error, KeyboardInterrupt)
    assert caught.error.__traceback__ is not None


def test_block_that_goes_well_keeps_nothing() -> None:
    with Caught() as caught:
        pass
    assert caught.error is None


def test_other_kinds_pass() -> None:
    with pytest.raises(KeyError), Caught(ValueError):
        raise KeyError("x")
    with pytest.raises(KeyError), Caught(passing=(LookupError,)):
        raise KeyError("x")
