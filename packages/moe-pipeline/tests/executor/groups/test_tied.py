import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_pipeline.executor.groups.tied import TiedParameters
from moe_pipeline.executor.groups.token_scale import token_scale
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.schedules.generators.basic import one_f_one_b
from ranktest import run_ranks

VOCABULARY, WIDTH = 7, 4


class Part(nn.Module):
    """A third of a language model whose embedding is its head."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if index != 1:
            weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
            self.embed = nn.Parameter(weight)

    def forward(self, x, *, target):
        x = self.embed[x] if self.index == 0 else x
        x = torch.tanh(self.linear(x))
        if self.index < 2:
            return StageOutput(tensors=(x,))
        labels, scale = target
        loss = F.cross_entropy(x @ self.embed.t(), labels, reduction="sum") * scale
        return StageOutput(loss=loss)


def parts_of(seed):
    torch.manual_seed(seed)
    parts = [Part(i) for i in range(3)]
    with torch.no_grad():
        parts[2].embed.copy_(parts[0].embed)
    return parts


def tokens_of(seed):
    """Microbatches of other lengths, with ignored labels; one with none that counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(VOCABULARY, (n,), generator=generator) for n in (5, 1, 3, 6)]
    labels = [torch.randint(VOCABULARY, (len(x),), generator=generator) for x in ids]
    labels[2][:] = -100
    labels[3][1] = -100
    return ids, labels


def test_tied_embeddings_and_the_token_mean_equal_one_process(seed):
    """pp=3 x dp=2: the mean over the tokens of all microbatches and replicas."""
    data = [tokens_of(seed), tokens_of(seed + 1)]

    def fn(rank, world_size):
        stage, replica = rank % 3, rank // 3
        pipelines = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
        replicas = [dist.new_group([s, s + 3]) for s in range(3)]
        ends = dist.new_group([0, 2, 3, 5])
        part, (ids, labels) = parts_of(seed)[stage], data[replica]
        scale = token_scale(labels, group=replicas[2]) if stage == 2 else 0.0
        executor = PipelineExecutor(
            {stage: part}, one_f_one_b(3, 4), rank=stage, forward_group=pipelines[replica]
        )
        executor.step([(x,) for x in ids], [(x, scale) for x in labels])
        if stage != 1:
            tied = TiedParameters([part.embed], group=ends)
            tied.reduce_gradients()
        dense = TiedParameters(list(part.linear.parameters()), group=replicas[stage])
        dense.reduce_gradients()
        return [p.grad.numpy() for p in part.parameters()]

    ranks = run_ranks(fn, 6)
    parts = parts_of(seed)
    parts[2].embed = parts[0].embed
    every = [pair for ids, labels in data for pair in zip(ids, labels, strict=True)]
    count = sum(int((labels != -100).sum()) for _, labels in every)
    for x, labels in every:
        for part in parts:
            out = part(x, target=(labels, 1.0 / count))
            x = out.tensors[0] if out.tensors else None
        out.loss.backward()
    for rank, grads in enumerate(ranks):
        expected = [p.grad for p in parts[rank % 3].parameters()]
        for got, want in zip(grads, expected, strict=True):
            assert (torch.from_numpy(got) - want).abs().max() < 1e-12


def test_gradients_that_some_or_no_holders_have():
    def fn(rank, world_size):
        parameters = [
            nn.Parameter(torch.ones(2)),
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.zeros(0)),
        ]
        tied = TiedParameters(parameters, group=dist.group.WORLD)
        if rank == 0:
            parameters[0].grad = torch.tensor([1.0, 2.0])
        parameters[2].grad = torch.zeros(0)
        tied.reduce_gradients()
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    assert run_ranks(fn, 2) == [[[1.0, 2.0], None, []]] * 2


def test_different_values_and_numbers_are_refused_on_every_rank():
    def fn(rank, world_size):
        group = dist.group.WORLD
        same = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        other = nn.Parameter(torch.full((2, 2), float(rank == 1)))
        with pytest.raises(ValueError, match=r"tied parameter 1 .* between rank 0 and ranks \[1\]"):
            TiedParameters([same, other], group=group)
        with pytest.raises(ValueError, match="differs"):  # -0.0 is no 0.0, nor is another shape
            TiedParameters([nn.Parameter(torch.zeros(4).view((2, 2) if rank else 4))], group=group)
        with pytest.raises(ValueError, match=r"tie \[1, 2, 1\] parameters"):
            TiedParameters([same] * (1 + (rank == 1)), group=group)
        TiedParameters([same, nn.Parameter(torch.tensor(2.0))], group=group)

    run_ranks(fn, 3)


def test_parameters_are_compared_by_their_own_values_wherever_they_lie():
    """Parts of a buffer whose other parts differ, and one that is strided."""

    def fn(rank, world_size):
        buffer = torch.zeros(12)
        buffer[3:9] = torch.arange(6.0)
        buffer[:3] = float(rank)
        part = nn.Parameter(buffer[3:9])
        matrix = torch.arange(6.0).view(2, 3)
        strided = nn.Parameter(matrix if rank else matrix.t().contiguous().t())
        TiedParameters([part, strided], group=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"tied parameter 0 .* differs"):
            TiedParameters([nn.Parameter(buffer[2:9])], group=dist.group.WORLD)

    run_ranks(fn, 2)


def test_gradients_that_are_kept_elsewhere_are_summed_in_place():
    def fn(rank, world_size):
        parameters = [
            nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
            nn.Parameter(torch.ones(1)),
        ]
        buffers = [torch.full((2,), rank + 0.25), torch.full((1,), 10.0)]
        TiedParameters(parameters, group=dist.group.WORLD).reduce_gradients(buffers)
        return [b.tolist() for b in buffers], [p.grad for p in parameters]

    assert run_ranks(fn, 2) == [([[1.5, 1.5], [20.0]], [None, None])] * 2
