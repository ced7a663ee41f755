"""Initial weights that are the same in every layout.

Every stored tensor (one linear weight), and of tensors that hold many experts each expert, is drawn
by its own generator, seeded by (seed, stored key): which rank draws it, and beside what, does not
matter.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = (
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
)


class Undrawn(TorchFunctionMode):
    """While it stands, no module fills its parameters; a context.

    Random numbers without memory (`device="meta"`) are Python in torch, which imports its compiler
    for them: seconds of every start.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave a tensor as it is where it would be filled."""
        named = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def initialise(
    key: str,
    tensor: Tensor,
    *,
    seed: int,
    std: float,
    whole: Sequence[int] | None = None,
    offset: Sequence[int] = (),
) -> None:
    """Fill the stored tensor `key`: norms with 1, biases with 0, the rest N(0, std).

    Args:
        tensor: any strided view of any floating dtype; drawn in fp32 on the CPU, then cast. The
            whole stored tensor or a box of it: of one that holds many experts [E, ...] some of
            them, each of which is drawn for itself; of another one the whole is there for a moment.
        whole: the shape of the stored tensor; None: that of `tensor`.
        offset: where in it `tensor` begins; zeros are left out where there are only such.
    """
    if is_norm(key):
        tensor.fill_(1.0)
    elif key.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() == 3:
        start, *within = offset or (0,)
        for number, expert in enumerate(tensor, start=start):
            drawn = _drawn(f"{key}[{number}]", (whole or tensor.shape)[1:], seed, std)
            expert.copy_(_part(drawn, within, expert.shape))
    else:
        drawn = _drawn(key, whole or tensor.shape, seed, std)
        tensor.copy_(_part(drawn, offset, tensor.shape))


def _part(drawn: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, first in enumerate(offset):
        drawn = drawn.narrow(dim, first, shape[dim])
    return drawn


def _drawn(name: str, shape: Sequence[int], seed: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32) * std


def is_norm(key: str) -> bool:
    """Whether `key` names the scale of a norm."""
    return key.endswith("norm.weight")


def decays(key: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases (also of many experts)."""
    return len(shape) > 1 and not is_norm(key) and not key.endswith("bias")
