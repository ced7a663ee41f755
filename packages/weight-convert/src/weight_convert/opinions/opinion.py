"""What transformers makes of two directories, and where torch is needed to compare numbers.

    opinion = second_opinion(Path("a"), Path("b"), logits=True, quantised=False)
    opinion.differences, opinion.max_logit_difference

torch and transformers are imported by the first call, never before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from weight_convert.errors import WeightConvertError
from weight_convert.outputs import PlannedTensor
from weight_convert.staging import OpenFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What transformers said.

    Attributes:
        version: of transformers.
        num_tensors: that it loaded from either directory.
        differences: of what it loaded, by its own names.
        not_loaded: stored tensors that it left out, such as layers of multi-token prediction.
        max_logit_difference: over all logits of one sequence; None where they were not asked for.
        largest_logit: the greatest magnitude among those of the first directory.
    """

    version: str
    num_tensors: int
    differences: Mapping[str, str]
    not_loaded: tuple[str, ...]
    max_logit_difference: float | None = None
    largest_logit: float | None = None


def second_opinion(a: Path, b: Path, *, logits: bool, quantised: bool) -> Opinion:
    """Load both directories with transformers and compare all values, and with `logits` those.

    Both models are in memory at once, in float32 unless one is `quantised`.

    Raises:
        WeightConvertError: torch or transformers is not installed, or transformers cannot load a
            directory, or not as what it is.
    """
    models = _needing("models", "logits")
    opinion: Opinion = models.compare_models(a, b, logits=logits, quantised=quantised)
    return opinion


def numbers_differ(
    a: PlannedTensor, b: PlannedTensor, files_a: OpenFiles, files_b: OpenFiles
) -> str | None:
    """How the numbers of two tensors of one shape and any dtypes differ; None where they do not.

    Raises:
        WeightConvertError: torch is not installed, or has no such dtype.
    """
    detail: str | None = _needing("numbers", "compute").first_number(a, b, files_a, files_b)
    return detail


def _needing(module: str, extra: str) -> ModuleType:
    try:
        return import_module(f"weight_convert.opinions.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise WeightConvertError(
            f"comparing values needs {error.name}: pip install 'weight-convert[{extra}]'"
        ) from error
