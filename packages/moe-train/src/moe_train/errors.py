"""What this package raises: one base class, and a ValueError or TypeError for a user's mistake.

Invariant: every `MoeTrainError` is a message for the person at the keyboard; the command prints it
as one line. A defect of the program raises something else and keeps its traceback.

    try:
        launch(...)
    except MoeTrainError as error:
        print(error)
"""


class MoeTrainError(RuntimeError):
    """A training job could not start, go on or end as asked."""


class TrainValueError(MoeTrainError, ValueError):
    """A value cannot be used; the message says what was given, what is expected and a remedy."""


class TrainTypeError(MoeTrainError, TypeError):
    """A value has a wrong type; the message says what was given and what is expected."""


class MissingFileError(TrainValueError, FileNotFoundError):
    """A file or folder that was named does not exist."""

    __str__ = Exception.__str__  # that of OSError expects a number first


class CheckpointNotSavedError(MoeTrainError):
    """A checkpoint could not be written, the same on every rank; older ones are as they were."""


class RankFailedError(MoeTrainError):
    """A rank of a launched job ended with an error; the message names the rank and the cause."""


class RankOutOfMemoryError(MoeTrainError, MemoryError):
    """A rank found no memory; the message says which rank, in which phase of which step."""


class StoppedUnsavedError(MoeTrainError):
    """A job was stopped before it could save; `signal_number` is the signal that did it."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def check_type(name: str, value: object, *expected: type) -> None:
    """Refuse an argument that is none of the expected types.

    Raises:
        TrainTypeError: names the argument, what is expected and what was given.
    """
    if not isinstance(value, expected):
        names = " or ".join(each.__name__ for each in expected)
        raise TrainTypeError(f"{name} must be {names}, got {type(value).__name__} {value!r}")


def check_finite(is_finite: bool) -> None:
    """Refuse logits that are not finite numbers: neither an argmax nor a mean of them says much."""
    if not is_finite:
        raise TrainValueError(
            "the model's logits are not finite numbers; the weights are damaged or overflow in "
            "their dtype: try dtype float32, or another checkpoint"
        )
