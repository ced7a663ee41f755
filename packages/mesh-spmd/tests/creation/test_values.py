import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from mesh_spmd import FlatSpec, MeshTypeError, MeshValueError, ProcessMesh, Spec, TensorSpec
from mesh_spmd.creation import arange, empty, full, randn, shard_tensor

MESH = ProcessMesh((2, 3), ("dp", "ep"))
LAYOUTS = [
    Spec.from_axes(MESH, {"ep": Shard(0), "dp": Shard(1)}),
    Spec.from_axes(MESH, {"ep": Shard(1), "dp": Shard(1)}, order=("ep", "dp")),
    Spec.from_axes(MESH, {"ep": Shard(0)}, sizes={"ep": (6, 0, 1)}),
    FlatSpec(Spec.from_axes(MESH, {"ep": Shard(0)}), ("dp",)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_the_same_in_every_layout(layout: Spec | FlatSpec) -> None:
    seed = random.randrange(2**40)
    alone = Spec(ProcessMesh((1,), ("dp",)), (Replicate(),))
    for make, dtype in (
        (lambda t, r: arange(t, r), torch.int32),
        (lambda t, r: randn(t, r, seed=seed), torch.float32),
        (lambda t, r: full(t, r, 2.5), torch.bfloat16),
    ):
        whole = make(TensorSpec((7, 5), dtype, alone), 0)
        for rank in MESH.ranks:
            tensor = TensorSpec((7, 5), dtype, layout)
            part = make(tensor, rank)
            assert part.dtype == dtype and tuple(part.shape) == tensor.local_shape(rank)
            assert torch.equal(part, shard_tensor(whole, tensor, rank)), f"seed {seed}"
            assert empty(tensor, rank).shape == part.shape


def test_arange_counts_the_elements_of_the_whole() -> None:
    tensor = TensorSpec((4, 6), torch.int64, LAYOUTS[0])
    whole = torch.arange(24).view(4, 6)
    assert all(torch.equal(arange(tensor, r), shard_tensor(whole, tensor, r)) for r in MESH.ranks)
    scalar = TensorSpec((), torch.int64, Spec.from_axes(MESH, {}))
    assert arange(scalar, 3).item() == 0


def test_random_numbers_are_normal_and_differ_by_seed() -> None:
    tensor = TensorSpec((500, 400), torch.float64, Spec(ProcessMesh((1,), ("dp",)), (Replicate(),)))
    a, b = randn(tensor, 0, seed=1), randn(tensor, 0, seed=2)
    for numbers in (a, a * b, a.flatten()[:-1] * a.flatten()[1:]):
        assert abs(numbers.mean().item()) < 0.02  # no drift, and no link to seeds and neighbours
    assert abs(a.std().item() - 1) < 0.02
    inside = [(a.abs() < x).double().mean().item() for x in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.01)
    assert torch.isfinite(a).all() and a.unique().numel() == a.numel()


def test_what_cannot_be_made_is_refused() -> None:
    due = TensorSpec((4,), torch.float32, Spec(MESH, (Partial(), Replicate())))
    with pytest.raises(MeshTypeError, match="partial over dp"):
        full(due, 0, 1.0)
    whole = TensorSpec((4,), torch.int8, Spec.from_axes(MESH, {}))
    with pytest.raises(MeshTypeError, match="floating point numbers"):
        randn(whole, 0, seed=0)
    with pytest.raises(MeshValueError, match="rank 6 is not in"):
        empty(whole, 6)
    with pytest.raises(MeshValueError, match="whole has shape"):
        shard_tensor(torch.zeros(5, dtype=torch.int8), whole, 0)


def test_a_flat_part_takes_no_memory_for_its_box() -> None:
    mesh = ProcessMesh((1024,), ("dp",))
    spec = FlatSpec(Spec(mesh, (Replicate(),)), ("dp",))
    tensor = TensorSpec((1 << 20, 4), torch.bfloat16, spec)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Sizes():
        part = arange(tensor, 5)
    begin, end = tensor.flat_range(5)
    assert torch.equal(part, torch.arange(begin, end).to(torch.bfloat16))
    assert largest <= 8 * (end - begin)
