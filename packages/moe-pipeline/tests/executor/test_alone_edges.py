import torch
from torch import nn

from moe_pipeline import PipelineExecutor
from moe_pipeline.executor import ExecutorOptions, MemoryTrack, StageOutput
from moe_pipeline.schedules import SCHEDULES
from ranktest import run_ranks


class _Stage(nn.Module):
    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(16, 16), is_last

    def forward(self, x: torch.Tensor, target: object | None) -> StageOutput:
        out = self.linear(x).relu()
        return StageOutput(loss=out.sum()) if self.is_last else StageOutput(tensors=(out,))


def _held(rank: int, *, is_alone: bool) -> list[int]:
    """Activation bytes after each action of a rank."""
    options = ExecutorOptions(
        alone=(lambda: (torch.zeros(4, 16, requires_grad=True),)) if is_alone else None
    )
    executor = PipelineExecutor(
        {rank: _Stage(is_last=rank == 2)}, SCHEDULES["1f1b"](3, 5), rank=rank, options=options
    )
    track = MemoryTrack()
    inputs = [(torch.ones(4, 16),) for _ in range(5)] if rank == 0 else None
    executor.step(inputs, track=track)
    return [track.peak_bytes]


def test_a_rank_without_neighbours_holds_what_it_holds_beside_them() -> None:
    beside = run_ranks(lambda rank, _: _held(rank, is_alone=False), 3)
    alone = [
        run_ranks(lambda *_, rank=rank: _held(rank, is_alone=True), 1, init=False)[0]
        for rank in range(3)
    ]
    assert alone == beside
