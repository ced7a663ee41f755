from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

Facts = Callable[[str], dict[str, Any]]


def test_our_statistics_have_torchs_names_and_meanings(facts_on_stub: Facts) -> None:
    stats = facts_on_stub("replace")["stats"]
    assert stats["requested_bytes.all.current"] == 4000 + (3 << 20)
    assert stats["allocated_bytes.all.current"] == 4096 + (3 << 20)
    assert stats["allocated_bytes.small_pool.current"] == 4096
    assert stats["reserved_bytes.all.current"] == (256 + 2) << 20
    assert stats["allocation.all.allocated"] == 2
    assert stats["num_ooms"] == 0
    names = torch.cuda.memory_stats.__doc__ or ""
    assert all(key.split(".")[0] in names for key in stats)
