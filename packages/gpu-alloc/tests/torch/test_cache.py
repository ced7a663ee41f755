"""CuPy beside torch in torch's caching allocator, with torch's own code, on a stub of CUDA."""

from collections.abc import Callable
from typing import Any

import pytest

Facts = Callable[[str], dict[str, Any]]
MIB = 1 << 20


@pytest.mark.parametrize("mode", ["segments", "replace"], ids=["torch's cache", "one arena"])
def test_cupy_and_torch_draw_on_one_memory(facts_on_stub: Facts, mode: str) -> None:
    facts = facts_on_stub(mode)["sharing"]
    if not facts:
        pytest.skip("no CuPy here")
    assert facts["overlap"] == []
    assert facts["used"] == 24 * 8 * MIB, "both count"
    # 24 blocks were live at a time, and 36 were made: CuPy has what torch freed.
    of_torchs_segments = 12 * 20 * MIB
    limit = of_torchs_segments if mode == "segments" else 0  # the arena's slab was there before
    assert facts["taken_from_the_device"] <= limit
    assert facts["out_of_memory"]
    assert facts["used_after"] == 0
    assert facts["still_there"]
