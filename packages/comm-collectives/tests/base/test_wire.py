"""Bytes of tensors: every dtype, every stride."""

import pytest
import torch
from torch.autograd import forward_ad

from comm_collectives.base.wire import (
    DTYPES,
    as_bytes,
    bytes_of,
    check_dense,
    check_tensors,
    dense,
    dtype_code,
    from_bytes,
    num_bytes,
)
from comm_collectives.errors import CommTypeError


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_through_bytes_and_back(dtype: torch.dtype) -> None:
    raw = torch.arange(8 * 3 * dtype.itemsize).to(torch.uint8) % 2
    x = raw.view(dtype).view(2, 4, 3)
    for view in (x, x[:, ::2], x.transpose(0, 2), x[:0]):
        flat = as_bytes(dense(view))
        assert flat.numel() == num_bytes(dtype, view.shape)
        back = from_bytes(flat, dtype, view.shape)
        assert back.dtype == dtype
        assert torch.equal(as_bytes(dense(back)), as_bytes(dense(view)))


def test_dtype_numbers_are_fixed() -> None:
    """They are on the wire: append, never reorder."""
    assert [dtype_code(d) for d in (torch.bool, torch.bfloat16, torch.complex128)] == [0, 10, 15]
    assert len(DTYPES) == len(set(DTYPES))


def test_conjugate_and_negative_views_are_resolved() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(from_bytes(as_bytes(dense(x.conj())), x.dtype, (2,)), x.conj().clone())
    assert as_bytes(dense(x.conj().imag)).view(torch.float32).tolist() == [-2, 4]


def test_bytes_of_copies() -> None:
    x = torch.tensor([0, 255, 7], dtype=torch.uint8)
    data = bytes_of(x)
    x.zero_()
    assert data == b"\x00\xff\x07"
    assert bytes_of(x[:0]) == b""


def test_only_dense_tensors_with_data_pass() -> None:
    check_dense(torch.ones(2)[::2], "x")
    for bad in (torch.eye(2).to_sparse(), torch.empty(2, device="meta"), [1.0]):
        with pytest.raises(TypeError, match="x "):
            check_dense(bad, "x")  # type: ignore[arg-type]


def test_one_expanded_element_has_bytes() -> None:
    x = torch.tensor(1.0).expand(1, 1)
    assert x.stride() == (0, 0)
    assert as_bytes(dense(x)).tolist() == [0, 0, 128, 63]


def test_tensors_that_wrap_others_are_refused() -> None:
    from torch.nested import nested_tensor

    jagged = nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="x is a NestedTensor, which wraps other tensors"):
        check_dense(jagged, "x")


def test_tensors_without_memory_are_refused() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    lazy, zeros = torch.nn.LazyLinear(2).weight, torch._efficientzerotensor(2)
    for bad in (freed, lazy, zeros):
        with pytest.raises(CommTypeError, match="x has no memory"):
            check_dense(bad, "x")
    check_dense(torch.ones(0), "x")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")  # torch's make_dual
def test_tensors_inside_transforms_are_refused() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CommTypeError, match="x is inside a transform"):
            check_dense(x, "x")
        return x.sum()

    torch.func.vmap(refuse)(torch.ones(2, 2))
    torch.func.grad(refuse)(torch.ones(2))
    with forward_ad.dual_level():
        refuse(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        check_dense(torch.ones(2), "x")


def test_sparse_tensor_is_made_dense_with_its_zeros() -> None:
    assert torch.equal(dense(torch.eye(3).to_sparse()), torch.eye(3))


def test_a_tensor_that_is_not_used_needs_no_memory() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    check_tensors([freed], are_used=False)
    with pytest.raises(CommTypeError, match=r"tensors\[0\] has no memory"):
        check_tensors([freed])
