import json
import math
from pathlib import Path
from typing import Any

import pytest

from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.snapshots.average.ema import EmaConfig
from unified_ckpt.tiers import TierOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timeout_s": 0}, r"timeout_s=0 must be a positive number"),
        ({"start_timeout_s": math.nan}, r"start_timeout_s=nan must be a positive number"),
        ({"backpressure_timeout_s": math.inf}, r"backpressure_timeout_s=inf must be a finite"),
        ({"backpressure_timeout_s": -1.0}, r"backpressure_timeout_s=-1.0 must not be negative"),
        ({"orphan_grace_s": math.nan}, r"orphan_grace_s=nan must not be negative"),
        ({"niceness": -5}, r"niceness=-5 must not be negative"),
        ({"num_buffers": 0}, r"num_buffers=0 must be at least 1"),
    ],
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncSaverConfig(**fields)


@pytest.mark.parametrize("fields", [{"num_buffers": 2.0}, {"niceness": 2.5}])
def test_what_is_counted_is_a_whole_number(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"is a float; expected int"):
        AsyncSaverConfig(**fields)


def test_the_saver_process_gets_json_with_whole_paths(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    tier = TierOptions(folder=tmp_path / "link" / "run")
    config = AsyncSaverConfig(tier=tier, ema=EmaConfig(decay=0.5))
    fields = json.loads(json.dumps(config.to_json()))
    assert TierOptions(**fields["tier"]).path == tmp_path.resolve() / "run"
    assert EmaConfig(**fields["ema"]) == config.ema
    assert fields["num_buffers"] == 2 and fields["timeout_s"] == config.timeout_s
    assert AsyncSaverConfig().to_json()["tier"] is None
