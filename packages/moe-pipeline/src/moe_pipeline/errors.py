"""The errors of this package that are not plain `ValueError` or `TypeError`.

A wrong argument raises `ValueError` or `TypeError` and says what to change. What goes wrong later,
while a schedule runs or is read, raises a subclass of `MoEPipelineError`.
"""


class MoEPipelineError(RuntimeError):
    """Base of this package's own errors."""


class ScheduleError(MoEPipelineError):
    """A schedule that `check` rejects was about to be executed; the message lists the problems."""


class StageTransferError(MoEPipelineError):
    """A send or receive between two stages failed: names rank, stage, action and peer.

    The communication error that caused it is the `__cause__`.
    """
