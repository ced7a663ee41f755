from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="shapes are torch's")

from gpu_alloc import TraceEvent  # noqa: E402
from gpu_alloc.torch import ShapesOnly, TraceRecorder  # noqa: E402
from gpu_alloc.trace import summarize  # noqa: E402
from ranktest import run_ranks  # noqa: E402


def _step(width: int) -> None:
    """A step whose sizes hang on integers: rows are counted, then cut by the counts."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(width, width))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    tokens = torch.arange(24) % 7
    counts = torch.bincount(tokens, minlength=7).tolist()
    x = torch.randn(24, width)
    parts = (x @ weight).split(counts)
    sum(part.exp().sum() for part in parts).backward()
    optimizer.step()


def test_a_step_allocates_the_same_on_shapes_as_on_numbers() -> None:
    def events(shapes: bool) -> list[tuple[str, int]]:
        def record(*_: int) -> list[TraceEvent]:
            with ShapesOnly() if shapes else nullcontext(), TraceRecorder() as recorder:
                _step(64)
            return recorder.events

        # In a process of its own: fake tensors start threads, after which nothing can be forked.
        trace = run_ranks(record, 1, init=False, timeout_s=300)[0]
        return [(event.action, event.size_bytes) for event in trace if event.action == "alloc"]

    assert events(True) == events(False)


def test_tensors_larger_than_the_machine_are_no_matter() -> None:
    with ShapesOnly(), TraceRecorder() as recorder:
        x = torch.randn(1 << 20, 1 << 20)
        assert float((x + x).sum()) == 0.0, "a number that nobody knows"
    assert summarize(recorder.events).peak_live_bytes >= 2 << 42


def test_integers_and_float64_keep_their_numbers() -> None:
    with ShapesOnly():
        tokens = torch.arange(10)
        assert tokens[tokens > 6].tolist() == [7, 8, 9]
        assert torch.tensor([1.5, 2.5], dtype=torch.float64).sum().item() == 4.0
        assert int(torch.zeros(3).argmax().dtype == torch.int64)


@pytest.mark.parametrize("name", ["topk", "sort"])
def test_what_is_largest_is_chosen_evenly(name: str) -> None:
    with ShapesOnly():
        scores = torch.randn(12, 6)
        found = scores.topk(2, dim=1) if name == "topk" else scores.sort(dim=1, descending=True)
        chosen = found.indices[:, :2]
        assert torch.bincount(chosen.reshape(-1)).tolist() == [4] * 6
        assert all(len(set(row)) == 2 for row in chosen.tolist())
