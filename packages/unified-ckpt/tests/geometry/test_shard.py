import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ranktest import run_ranks
from unified_ckpt import Box, Shard
from unified_ckpt.geometry import BoxMeta


def test_a_shard_describes_its_box() -> None:
    shard = Shard.of("w", torch.zeros(2, 3).T, global_shape=(6, 2), offset=(3, 0))
    meta = BoxMeta("w", "F32", Box((6, 2), (3, 0), (3, 2)))
    assert shard.meta == meta
    assert BoxMeta.from_json(meta.to_json()) == meta
    assert meta.box.numel == 6


def test_torch_sizes_and_lists_become_tuples_of_ints() -> None:
    tensor = torch.zeros(2, 3)
    shard = Shard.of("w", tensor, global_shape=tensor.shape, offset=[0, 0])  # type: ignore[arg-type]
    assert type(shard.box.global_shape) is tuple and shard.box.offset == (0, 0)


@pytest.mark.parametrize(
    ("key", "shape", "global_shape", "offset", "message"),
    [
        ("", (2,), (2,), (0,), "cannot name"),
        ("__metadata__", (2,), (2,), (0,), "cannot name"),
        ("w", (2,), (2, 1), (0, 0), "same number of dims"),
        ("w", (2,), (2,), (0, 0), "same number of dims"),
        ("w", (2,), (2,), (1,), r"\[1:3\] does not lie inside global_shape \(2,\)"),
        ("w", (2,), (4,), (-1,), "does not lie inside"),
        ("w", (0,), (4,), (5,), "does not lie inside"),
    ],
)
def test_a_box_outside_its_tensor_is_refused(
    key: str, shape: tuple, global_shape: tuple, offset: tuple, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Shard.of(key, torch.zeros(shape), global_shape=global_shape, offset=offset)


def test_what_is_not_a_plain_tensor_is_refused() -> None:
    for tensor, message in [
        ([1.0, 2.0], "is a list, not a Tensor"),
        (torch.zeros(2).to_sparse(), "not a plain strided tensor"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.complex128), "cannot hold torch.complex128"),
    ]:
        with pytest.raises(TypeError, match=message):
            Shard.of("w", tensor, global_shape=(2,), offset=(0,))  # type: ignore[arg-type]
    packed = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match="at least one dim"):
        Shard.of("w", packed, global_shape=(), offset=())


def test_a_dtensor_is_refused_with_the_remedy() -> None:
    def fn(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Replicate()])
        with pytest.raises(TypeError, match="pass its local tensor"):
            Shard.of("w", tensor, global_shape=(2,), offset=(0,))

    run_ranks(fn, 1)


def test_parameters_of_a_class_of_their_own_are_taken() -> None:
    class Expert(torch.nn.Parameter):
        pass

    shard = Shard.of("w", Expert(torch.zeros(2)), global_shape=(2,), offset=(0,))
    assert shard.box.local_shape == (2,)
