"""The one base class of what this package raises beyond ValueError, TypeError and OSError.

Invariant: every `MoeTrainError` is a message for the person at the keyboard; the command prints it
as one line. A defect of the program raises something else and keeps its traceback.

    try:
        launch(...)
    except MoeTrainError as error:
        print(error)
"""


class MoeTrainError(RuntimeError):
    """A training job could not start, go on or end as asked."""


class RankFailedError(MoeTrainError):
    """A rank of a launched job ended with an error; the message names the rank and the cause."""


class StoppedUnsavedError(MoeTrainError):
    """A job was stopped before it could save; `signal_number` is the signal that did it."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
