"""Checkpoints between random layouts: `benchmarks/moe_train_layout_pairs.py`, shortly."""

import random
from pathlib import Path

import pytest

from ranktest import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEED = 3


def test_three_pairs_of_random_layouts_go_on_alike_and_keep_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied embeddings among them; of the last one bfloat16 with master weights, too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import moe_train_layout_pairs as benchmark

    drawn = benchmark.drawn_pairs(tmp_path, 3, random.Random(SEED), ["mixtral"])
    pairs = [pair for pair in drawn if not pair.saves.low or pair is drawn[-1]]
    assert any(pair.name.endswith("-tied") for pair in pairs)

    def on_ranks(size: int, jobs: list[list[str]]) -> None:
        run_ranks(lambda *_: benchmark.on_rank(jobs), size, timeout_s=300)

    apart, wrong = benchmark.compared(pairs, on_ranks)
    assert apart <= benchmark.LIMIT
    assert wrong == 0
