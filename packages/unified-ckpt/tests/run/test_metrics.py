import math
from pathlib import Path

import pytest
import torch

from unified_ckpt import Shard, save
from unified_ckpt.run.metrics import best_of, encode_metrics, read_metric, with_metrics


def test_the_best_is_the_first_of_the_least_or_greatest_and_never_nan() -> None:
    values = {Path("a"): 2.0, Path("b"): math.nan, Path("c"): None, Path("d"): 1.0, Path("e"): 1.0}
    assert best_of(values, "min") == Path("d")
    assert best_of(values, "max") == Path("a")
    assert best_of({Path("b"): math.nan}, "min") is None


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_metrics(1, {"loss": "low"})


def test_a_metric_comes_back_and_none_where_there_is_none(tmp_path: Path) -> None:
    shard = Shard.of("w", torch.ones(1), global_shape=(1,), offset=(0,))
    files = with_metrics({"a.json": b"{}"}, 3, {"loss": 0.5, "bad": math.nan})
    path = save({"model": [shard]}, checkpoint_id=tmp_path / "c", files=files).path
    assert read_metric(path, "loss") == 0.5 and math.isnan(read_metric(path, "bad"))
    assert read_metric(path, "accuracy") is None
    other = save({"model": [shard]}, checkpoint_id=tmp_path / "d").path
    assert read_metric(other, "loss") is None
    with pytest.raises(ValueError, match="use another name"):
        with_metrics(files, 4, {})
