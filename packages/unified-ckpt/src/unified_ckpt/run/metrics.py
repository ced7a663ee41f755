"""The metrics of a checkpoint, a file `metrics.json` in it, and which checkpoint is best by one.

best_of({path: read_metric(path, "loss") for path in paths}, "min")
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeVar

from unified_ckpt.errors import CheckpointValueError, LoadError, StoreError, check_type
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import load_files

METRICS_NAME = "metrics.json"

_K = TypeVar("_K")


def best_of(values: Mapping[_K, float | None], mode: Literal["min", "max"]) -> _K | None:
    """Return the key of the best value, the first one of equals; None and NaN never count."""
    counted = {p: v for p, v in values.items() if v is not None and not math.isnan(v)}
    if not counted:
        return None
    sign = 1 if mode == "min" else -1
    return min(counted, key=lambda key: sign * counted[key])


def encode_metrics(step: int, metrics: Mapping[str, float]) -> bytes:
    """Write the metrics of a checkpoint as they stand in its `metrics.json`.

    Raises:
        CheckpointTypeError: a metric is not a number.
    """
    for name, value in metrics.items():
        check_type(f"metric {name!r}", value, SupportsFloat)
    numbers = {name: float(value) for name, value in metrics.items()}
    return json.dumps({"step": int(step), "metrics": numbers}).encode()


def with_metrics(
    files: Mapping[str, bytes], step: int, metrics: Mapping[str, float] | None
) -> dict[str, bytes]:
    """Add `metrics.json` to the files of a checkpoint, if there are metrics."""
    if METRICS_NAME in files:
        raise CheckpointValueError(
            f"files has {METRICS_NAME!r}, where metrics stand; use another name"
        )
    return {**files} if metrics is None else {**files, METRICS_NAME: encode_metrics(step, metrics)}


def read_metric(checkpoint: Path | Location, name: str) -> float | None:
    """Return a metric of a checkpoint, None where it has none.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        table: Any = json.loads(load_files(checkpoint, METRICS_NAME))
        value = table["metrics"].get(name)
    except StoreError:
        raise
    except (LoadError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) else None
