"""Gradients through resharding, on running ranks, against autograd on the whole tensor."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from mesh_spmd import (
    MeshStateError,
    MeshTypeError,
    MeshValueError,
    ProcessMesh,
    Spec,
    TensorSpec,
    join_tensors,
    reshard_tensor,
    split_tensor,
)
from mesh_spmd.reshard.execute import device_of
from mesh_spmd.reshard.parts import plan_join, plan_split
from ranktest import run_ranks

WHOLE = ProcessMesh((2, 2), ("pp", "ep"))  # of 5 ranks; rank 4 is outside
STAGES = [WHOLE.submesh("ep", of={"pp": pp}) for pp in range(2)]
EXPERTS, ROWS = 7, 3


def layouts() -> tuple[TensorSpec, list[TensorSpec]]:
    """7 experts over all ranks; 4 of them on the first stage and 3, unevenly, on the second."""
    whole = TensorSpec((EXPERTS, ROWS), torch.float64, Spec.from_dims(WHOLE, [("pp", "ep"), None]))
    ragged = Spec.from_axes(STAGES[1], {"ep": Shard(0)}, sizes={"ep": (3, 0)})
    parts = [
        TensorSpec((4, ROWS), torch.float64, Spec.from_axes(STAGES[0], {"ep": Shard(0)})),
        TensorSpec((3, ROWS), torch.float64, ragged),
    ]
    return whole, parts


def test_experts_go_to_sub_meshes_and_back_with_gradients_and_ranks_outside_take_part() -> None:
    whole, parts = layouts()
    value = torch.randn(EXPERTS, ROWS, dtype=torch.float64)
    weight = torch.randn(EXPERTS, ROWS, dtype=torch.float64)
    starts = (0, 4)

    def box(tensor: TensorSpec, rank: int, start: int = 0) -> tuple[slice, ...]:
        rows, columns = tensor.box(rank).slices()
        return slice(rows.start + start, rows.stop + start), columns

    def fn(rank: int, world_size: int) -> None:
        inside = whole.mesh.position(rank) is not None
        local = value[box(whole, rank)].clone().requires_grad_() if inside else None
        held = split_tensor(local, whole, parts)
        loss = torch.zeros((), dtype=torch.float64)
        for part, tensor, start in zip(held, parts, starts, strict=True):
            if tensor.mesh.position(rank) is None:
                assert part.numel() == 0
                loss = loss + part.sum()
                continue
            here = box(tensor, rank, start)
            assert torch.equal(part, value[here])
            loss = loss + (part**2 * weight[here]).sum()
        back = join_tensors(held, parts, whole)
        if local is None:
            (loss + back.sum()).backward()
            return
        assert torch.equal(back, local)
        (loss + 3 * back.sum()).backward()
        expected = 2 * value * weight + 3
        assert local.grad is not None
        torch.testing.assert_close(local.grad, expected[box(whole, rank)], rtol=1e-12, atol=0)
        check_reshard(rank, value)

    def check_reshard(rank: int, value: torch.Tensor) -> None:
        # A partial sum becomes sharded; its gradient is on every rank of the sum.
        source = TensorSpec((EXPERTS, ROWS), torch.float64, Spec(WHOLE, (Partial(), Replicate())))
        target = TensorSpec((EXPERTS, ROWS), torch.float64, Spec(WHOLE, (Shard(0), Shard(1))))
        addend = ((rank // 2 + 1) * value).requires_grad_()
        got = reshard_tensor(addend, source, target, GROUP[0])
        here = target.box(rank).slices()
        torch.testing.assert_close(got, 3 * value[here], rtol=1e-12, atol=0)
        (got * weight[here]).sum().backward()
        assert addend.grad is not None
        assert torch.equal(addend.grad, weight)

    GROUP: list[object] = [None]

    def with_group(rank: int, world_size: int) -> None:
        import torch.distributed as dist

        GROUP[0] = dist.new_group([0, 1, 2, 3])
        fn(rank, world_size)

    run_ranks(with_group, 5)


def test_parts_that_do_not_make_up_the_whole_are_refused() -> None:
    whole, parts = layouts()
    with pytest.raises(MeshValueError, match="4 together; the whole has 7"):
        plan_split(whole, parts[:1])
    with pytest.raises(MeshValueError, match="part 0 has shape"):
        plan_join(parts, whole, dim=1)
    due = TensorSpec((4, ROWS), torch.float64, Spec(STAGES[0], (Partial(),)))
    with pytest.raises(MeshValueError, match="part 0 has partial values over ep"):
        plan_join([due, parts[1]], whole)
    with pytest.raises(MeshTypeError, match="partial sums of the source alone"):
        split_tensor(None, whole, [due, parts[1]])


def test_a_split_moves_each_expert_once() -> None:
    whole, parts = layouts()
    plan = plan_split(whole, parts)
    # Boxes of all ranks: 2, 2, 2, 1 experts; of the stages: 2, 2 and 3, 0.
    assert plan.received_bytes == {0: 0, 1: 0, 2: 8 * ROWS, 3: 0}
    assert plan.sent_bytes == {0: 0, 1: 0, 2: 0, 3: 8 * ROWS}


@pytest.mark.parametrize(
    "given",
    [[torch.empty(0, device="meta")], [None, torch.empty(0, device="meta"), torch.empty(1)]],
)
def test_buffers_lie_where_what_a_rank_gives_lies_an_empty_tensor_too(
    given: list[torch.Tensor | None],
) -> None:
    """A group with a backend for each device does not say where the others' tensors lie."""
    assert device_of(given, None) == torch.device("meta")


@pytest.mark.parametrize("partial", [False, True])
def test_gradients_have_gradients(partial: bool) -> None:
    mesh = ProcessMesh((2,), ("dp",))
    first = Partial("sum") if partial else Shard(0)
    source = TensorSpec((3,), torch.float64, Spec(mesh, (first,)))
    target = TensorSpec((3,), torch.float64, Spec(mesh, (Replicate(),)))
    whole = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def fn(rank: int, world_size: int) -> None:
        mine = whole / 2 if partial else whole[source.box(rank).slices()]
        x = mine.clone().requires_grad_()
        y = reshard_tensor(x, source, target)
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        ((x**2).sum() + (g**2).sum()).backward()
        # Of sum(g^2) with g = 3 y^2: 36 y^3. A partial x is half of y on each rank.
        expected = 2 * mine + 36 * (whole**3 if partial else mine**3)
        assert torch.allclose(x.grad, expected), (x.grad, expected)

    run_ranks(fn, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("empty", [False, True])
def test_ranks_outside_take_part_in_the_backward(dtype: torch.dtype, empty: bool) -> None:
    source = TensorSpec((4,), dtype, Spec(ProcessMesh((1,), ("a",)), (Replicate(),)))
    target = TensorSpec((4,), dtype, Spec(ProcessMesh((2,), ("b",)), (Shard(0),)))

    def fn(rank: int, world_size: int) -> None:
        outside = torch.empty(0, dtype=dtype) if empty else None
        local = outside if rank else torch.ones(4, dtype=dtype, requires_grad=True)
        held = reshard_tensor(local, source, target)
        (held * (rank + 1)).abs().sum().backward()
        if rank == 0:
            assert local.grad.real.tolist() == [1, 1, 2, 2]

    run_ranks(fn, 2)


def test_resharding_needs_a_process_group() -> None:
    whole, parts = layouts()
    with pytest.raises(MeshStateError, match="resharding needs a process group"):
        reshard_tensor(torch.zeros(2, ROWS, dtype=torch.float64), whole, whole)
    with pytest.raises(MeshStateError, match="resharding needs a process group"):
        join_tensors([None, None], parts, whole)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_local_tensors_is_refused(count: int) -> None:
    mesh = ProcessMesh((1,), ("a",))
    part = TensorSpec((1,), torch.float32, Spec(mesh, (Replicate(),)))
    whole = TensorSpec((2,), torch.float32, Spec(mesh, (Replicate(),)))

    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(MeshValueError, match=f"{count} local tensors .* the plan has 2"):
            join_tensors([torch.ones(1)] * count, [part, part], whole)
        with pytest.raises(MeshTypeError, match="must be a tensor or None, got the list"):
            reshard_tensor([torch.ones(1)], part, part)  # type: ignore[arg-type]
        with pytest.raises(MeshTypeError, match="must be a list, one for each part, got the None"):
            join_tensors(None, [part, part], whole)  # type: ignore[arg-type]

    run_ranks(fn, 1)
