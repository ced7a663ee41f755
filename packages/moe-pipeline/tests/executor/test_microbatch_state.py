import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_pipeline.errors import StageTransferError
from moe_pipeline.executor.microbatch_state import MicrobatchState
from moe_pipeline.executor.pipeline_executor import PipelineExecutor
from moe_pipeline.executor.stage_io import StageOutput, gate_output
from moe_pipeline.schedules.generators.basic import forward_then_backward
from moe_pipeline.schedules.generators.interleaved import looped_bfs
from ranktest import run_ranks

UNIT = 1 << 18  # elements; too large to travel in the message of its header, whose memory is kept


class Storages(TorchDispatchMode):
    """Weak references to the storage of every tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.refs = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.note(result, given=[args, kwargs])
        return result

    def note(self, tensors, given):
        known = {storage._cdata for storage in storages_of(given)}
        for storage in storages_of(tensors):
            if storage.nbytes() and storage._cdata not in known:  # a view makes none
                ref = StorageWeakRef(storage)
                self.refs.setdefault(ref.cdata, (ref, storage.nbytes()))

    def of_inputs(self, stage, given):
        """The stage, whose inputs count too: a thread without this mode may have received them."""

        def noting(*inputs, **kwargs):
            self.note(inputs, given)
            return stage(*inputs, **kwargs)

        return noting

    def units(self, unit_bytes):
        alive = [size for ref, size in self.refs.values() if not ref.expired()]
        # The memory that messages arrive in is no activation.
        return sum(size for size in alive if size > 0.02 * unit_bytes) / unit_bytes


def storages_of(tree):
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Look(torch.autograd.Function):
    """Calls a function when the backward comes here."""

    @staticmethod
    def forward(ctx, look, x):
        ctx.look = look
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.look()
        return None, gradient


def three_units(x, bias):
    """Saves three results, neither its input nor its output."""
    return torch.tanh(torch.exp(torch.tanh(x + bias))) * 0.5


@pytest.fixture(scope="module", autouse=True)
def loaded_modes():
    """What torch loads at the first use of a mode, loaded before the ranks are forked."""
    with Storages():
        torch.ones(1, requires_grad=True).sum().backward()


def units_at_first_backward(schedule, stages_of, sample):
    """Of each rank, the units alive when its first backward begins."""

    def fn(rank, world_size):
        storages, found = Storages(), []

        def look(unit_bytes):
            found.append(found[0] if found else storages.units(unit_bytes))

        inputs = [(sample(),) for _ in range(schedule.num_microbatches)]
        stages = {n: storages.of_inputs(s, inputs) for n, s in stages_of(rank, look).items()}
        executor = PipelineExecutor(stages, schedule, rank=rank)
        with storages:
            executor.step(inputs)
        left = storages.units(4 * UNIT)
        return found[0], left

    return run_ranks(fn, len(schedule.ranks))


def test_a_middle_stage_holds_19_units_at_the_first_of_6_backwards():
    """3 saved of each microbatch, and one gradient; torch holds 25, the 6 inputs beside these."""

    def stages_of(rank, look):
        bias = torch.zeros(UNIT, requires_grad=True)

        def stage(x, *, target):
            y = Look.apply(lambda: look(4 * UNIT), three_units(x, bias))
            return StageOutput(loss=y.sum()) if rank == 2 else StageOutput(tensors=(y,))

        return {rank: stage}

    schedule = forward_then_backward(3, 6)
    ranks = units_at_first_backward(schedule, stages_of, lambda: torch.zeros(UNIT))
    assert 18 <= ranks[1][0] <= 19
    assert ranks[0][0] <= 19
    # Afterwards: the caller's losses on the last stage, and the weight's gradient.
    assert all(left < 2 for _, left in ranks)


def test_the_last_stage_holds_8_5_units_of_logits_at_the_first_of_8_backwards():
    """torch holds 16.25: the logits beside their log-softmax, whoever returns them."""
    tokens, hidden, vocabulary = 64, 8, 4096

    def stages_of(rank, look):
        head = torch.randn(vocabulary, hidden, requires_grad=True)
        labels = torch.arange(tokens)

        def stage(x, *, target):
            if rank == 0:
                return StageOutput(tensors=(x * head[0],))
            logits = F.linear(x, head)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            loss = Look.apply(lambda: look(4 * tokens * vocabulary), loss)
            return StageOutput(tensors=(logits,), loss=loss)

        if rank == 0:
            look(1)  # nothing to look at
        return {rank: stage}

    schedule = forward_then_backward(2, 8)
    ranks = units_at_first_backward(schedule, stages_of, lambda: torch.zeros(tokens, hidden))
    assert 8 <= ranks[1][0] <= 8.5


def test_stages_of_one_rank_hand_over_without_keeping():
    """Two ranks, four stages: what each saves of 4 microbatches, and no input or output beside."""

    def stages_of(rank, look):
        bias = torch.zeros(UNIT, requires_grad=True)

        def make(index):
            def stage(x, *, target):
                y = Look.apply(lambda: look(4 * UNIT), three_units(x, bias))
                return StageOutput(loss=y.sum()) if index == 3 else StageOutput(tensors=(y,))

            return stage

        return {index: make(index) for index in (rank, rank + 2)}

    schedule = looped_bfs(2, 4)
    ranks = units_at_first_backward(schedule, stages_of, lambda: torch.zeros(UNIT))
    assert 24 <= ranks[1][0] <= 24 + 1
    assert 24 <= ranks[0][0] <= 24 + 1


def test_full_recompute_keeps_the_inputs_and_nothing_else():
    def stages_of(rank, look):
        bias = torch.zeros(UNIT, requires_grad=True)

        def stage(x, *, target):
            y = checkpoint(three_units, x, bias, use_reentrant=False)
            y = Look.apply(lambda: look(4 * UNIT), y)
            return StageOutput(loss=y.sum()) if rank == 2 else StageOutput(tensors=(y,))

        return {rank: stage}

    schedule = forward_then_backward(3, 6)
    ranks = units_at_first_backward(schedule, stages_of, lambda: torch.zeros(UNIT))
    assert 6 <= ranks[1][0] <= 7


def test_a_slot_refuses_gradients_that_do_not_fit():
    state = MicrobatchState(roots=[gate_output(torch.ones(3, requires_grad=True) * 2)])
    for wrong, text in (([], "of 0 tensors"), ([torch.ones(4)], r"\(4,\) came back .* \(3,\)")):
        with pytest.raises(StageTransferError, match=text):
            state.put_output_gradients(wrong)
