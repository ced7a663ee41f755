"""The errors of weight-convert: one base class, which is a `ValueError` too.

    try:
        convert(src, dst, spec=get_spec("qwen3_moe"), to="fused")
    except WeightConvertError as error:
        print(error)

Each message says which file or tensor, what was expected, what was found and what to change.
"""


class WeightConvertError(ValueError):
    """Base class of every error that this package raises on purpose."""


class WeightConvertTypeError(WeightConvertError, TypeError):
    """An argument has the wrong type."""


class UnknownFamilyError(WeightConvertError):
    """No `FamilySpec` describes this kind of model."""


class CorruptFileError(WeightConvertError):
    """A file is not what its own header or index says: truncated, overlapping, unreadable."""


class IncompleteExpertsError(WeightConvertError):
    """Experts are missing, doubled or of different shapes; they cannot be regrouped."""


class TargetExistsError(WeightConvertError):
    """Something stands, or is being written, where the output was to be published."""
