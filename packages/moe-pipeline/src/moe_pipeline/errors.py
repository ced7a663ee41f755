"""The errors of this package: one `except MoEPipelineError` catches whatever it raises on purpose.

A wrong argument is also a `ValueError` or a `TypeError`, and says what to change.
"""


class MoEPipelineError(Exception):
    """Base of every error that this package raises on purpose."""


class MoEValueError(MoEPipelineError, ValueError):
    """A value does not fit; the message says what would."""


class MoETypeError(MoEPipelineError, TypeError):
    """An argument has the wrong type."""


class ScheduleError(MoEValueError):
    """A schedule that `check` rejects was about to be executed; the message lists the problems."""


class StageTransferError(MoEPipelineError, RuntimeError):
    """A send or receive between two stages failed: names rank, stage, action and peer.

    The communication error that caused it is the `__cause__`.
    """
