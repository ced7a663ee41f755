import torch

from moe_pipeline.fused_experts import FusedExperts, _blocks


def make(rows, experts, hidden, intermediate):
    return (
        torch.randn(rows, hidden, requires_grad=True),
        torch.rand(rows, requires_grad=True),
        torch.randn(experts, 2 * intermediate, hidden, requires_grad=True),
        torch.randn(experts, hidden, intermediate, requires_grad=True),
    )


def test_only_input_weights_and_gate_up_output_are_saved(seed):
    rows, experts, hidden, intermediate = 24, 4, 16, 8
    tensors = make(rows, experts, hidden, intermediate)
    parameters = {t.data_ptr() for t in tensors[2:]}
    saved = []

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        FusedExperts.apply(*tensors, (10, 0, 6, 8))
    assert sum(saved) == rows * (hidden + 1 + 2 * intermediate)


def test_gradients_of_empty_experts_are_exact_zeros(seed):
    tensors = make(6, 4, 8, 4)
    FusedExperts.apply(*tensors, (0, 6, 0, 0)).sum().backward()
    for weight in tensors[2:]:
        assert not weight.grad[[0, 2, 3]].any()
        assert weight.grad[1].any()


def test_blocks_cover_every_row_once_and_keep_to_the_limit():
    counts = (5, 0, 3, 9, 1, 1, 0, 2)
    blocks = list(_blocks(counts, 6))
    assert [block.start for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].end) == (0, sum(counts))
    experts = [pair for block in blocks for pair in zip(block.experts, block.counts, strict=True)]
    assert experts == [(expert, count) for expert, count in enumerate(counts) if count]
    for block in blocks:
        assert block.end - block.start == sum(block.counts)
        assert block.end - block.start <= 6 or len(block.experts) == 1
    assert list(_blocks((0, 0), 6)) == []


def test_inputs_are_not_modified(seed):
    tensors = make(6, 2, 8, 4)
    before = [t.detach().clone() for t in tensors]
    gradient = torch.ones(6, 8)
    FusedExperts.apply(*tensors, (2, 4)).backward(gradient)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(gradient, torch.ones(6, 8))
