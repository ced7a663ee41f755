"""Moving bytes over frames: what goes from whom to whom. All tensors are flat uint8.

send_to_all(call, flat, root)
"""

import torch

from comm_collectives.shm.arguments import Tensors
from comm_collectives.shm.calls import Call

# Above this size the ranks that got a part of a broadcast show it to the others.
_SHARED_BYTES = 1 << 17


def send_to_all(call: Call, flat: torch.Tensor, root: int) -> None:
    """The bytes of `root` come to all others."""
    rank, size = call.rank, call.size
    if size == 2 or flat.numel() < _SHARED_BYTES:
        sends = [flat] * size if rank == root else None
        call.exchange(sends, _only(root, flat, size))
        return
    parts = flat.tensor_split(size)
    call.exchange(parts if rank == root else None, _only(root, parts[rank], size))
    own, nothing = parts[rank], flat[:0]
    # The root has all, and has sent each rank its part; the part for itself all others lack.
    shown = [nothing if r == root and rank != root else own for r in range(size)]
    wanted = [nothing if rank == root else parts[r] for r in range(size)]
    call.exchange(shown, wanted)


def collect_for_all(call: Call, source: torch.Tensor, targets: Tensors) -> None:
    """Target `r` of every rank receives the source of rank r; all have one size."""
    call.exchange([source] * call.size, targets)
    _copy(targets[call.rank], source)


def collect(call: Call, source: torch.Tensor, targets: Tensors, root: int) -> None:
    """Target `r` of `root` receives the source of rank r; the others have no targets."""
    if call.rank == root:
        call.exchange(None, targets)
        _copy(targets[root], source)
    else:
        call.exchange(_only(root, source, call.size), None)


def spread(call: Call, sources: Tensors, target: torch.Tensor, root: int) -> None:
    """Source `r` of `root` goes to the target of rank r; the others have no sources."""
    if call.rank == root:
        call.exchange(sources, None)
        _copy(target, sources[root])
    else:
        call.exchange(None, _only(root, target, call.size))


def _only(rank: int, flat: torch.Tensor, size: int) -> Tensors:
    """Something for one rank, and nothing for the others."""
    return [flat if r == rank else flat[:0] for r in range(size)]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
