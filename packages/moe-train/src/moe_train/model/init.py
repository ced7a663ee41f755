"""Initial weights that are the same in every layout.

Every stored tensor (one linear weight), and of tensors that hold many experts each expert, is drawn
by its own generator, seeded by (seed, stored key): which rank draws it, and beside what, does not
matter.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def initialise(key: str, tensor: Tensor, *, seed: int, std: float, first: int = 0) -> None:
    """Fill the stored tensor `key`: norms with 1, biases with 0, the rest N(0, std).

    Args:
        tensor: any strided view of any floating dtype; drawn in fp32 on the CPU, then cast. The
            whole stored tensor, or of one that holds many experts [E, ...] some of them.
        first: number of the first expert in `tensor`; each is drawn for itself.
    """
    if is_norm(key):
        tensor.fill_(1.0)
    elif key.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() == 3:
        for number, expert in enumerate(tensor, start=first):
            _draw(f"{key}[{number}]", expert, seed, std)
    else:
        _draw(key, tensor, seed, std)


def _draw(name: str, tensor: Tensor, seed: int, std: float) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    tensor.copy_(drawn * std)


def is_norm(key: str) -> bool:
    """Whether `key` names the scale of a norm."""
    return key.endswith("norm.weight")


def decays(key: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases (also of many experts)."""
    return len(shape) > 1 and not is_norm(key) and not key.endswith("bias")
