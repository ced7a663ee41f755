"""Broadcast of nested values with tensors in them, without pickle and without guessing sizes.

The structure travels as JSON, small tensors in one flat buffer behind it, big ones by themselves
straight into their place. A value without big tensors takes one message if it is short, two if not.

    state = broadcast_nested({"step": 3, "rng": rng_state} if rank == 0 else None, src=0)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm_collectives.calls import Call
from comm_collectives.errors import MismatchError, PeerFailedError
from comm_collectives.groups import check_timeout, group_state
from comm_collectives.nested_codec import decode, encode
from comm_collectives.wire import (
    DTYPES,
    as_bytes,
    bytes_of,
    dense,
    dtype_code,
    from_bytes,
    num_bytes,
)

_FIRST_BYTES = 4096  # the first message: three words, then as much of the block as fits
_HEAD_BYTES = 24
_ROOM_BYTES = _FIRST_BYTES - _HEAD_BYTES
_BIG_BYTES = 1 << 20  # from here on a tensor travels by itself, uncopied
_ALIGN_BYTES = 16
_MAGIC_VALUE, _MAGIC_REFUSED = 0x636F6D6D_01, 0x636F6D6D_02


def broadcast_nested(
    obj: object,
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
) -> object:
    """Return, on every rank, the value that rank `src` gave. Collective.

    Supported: None, bool, int, float, str, bytes, tensors of every plain dtype, and lists, tuples,
    dicts, OrderedDicts, namedtuples and dataclasses of them, kept as they are. Tensors carry no
    gradient history and arrive contiguous; one that occurs twice arrives as one; of a view only
    its own elements travel. On `src` the containers are new and the tensors share memory with the
    given ones (unless moved).

    Args:
        obj: the value on `src`; ignored elsewhere.
        src: rank inside the group.
        group: None is the default group.
        device: where the tensors go; None leaves each on the kind of device it has on `src`, if the
            group can move data there, else on the host.
        timeout_s: limit in seconds for each message; None is the group's own limit.

    Raises:
        ValueError: `src` is not a rank of the group.
        TypeError: on `src`, a part cannot be sent; on a receiver, a class is unknown there.
        PeerFailedError: `src` refused its value (raised on every other rank), or a peer died.
        CommError: a message failed; see the subclasses.
    """
    resolved, state = group_state(group)
    check_timeout(timeout_s)
    if not 0 <= src < state.size:
        raise ValueError(
            f"src={src} is not a rank of a group of {state.size}; give 0..{state.size - 1}"
        )
    channel = _Channel(
        call=Call(state, "broadcast_nested", timeout_s=timeout_s), group=resolved, src=src
    )
    if state.rank == src:
        return _send(channel, obj, device)
    return _receive(channel, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channel:
    call: Call
    group: dist.ProcessGroup
    src: int

    def broadcast(self, flat: torch.Tensor) -> torch.Tensor:
        """Broadcast a flat uint8 tensor in place."""
        if flat.numel() and self.call.state.size > 1:
            self.call.run(
                lambda: dist.broadcast(flat, group=self.group, group_src=self.src, async_op=True),
                on_cpu=flat.device.type == "cpu",
            )
        return flat

    def broadcast_block(self, block: torch.Tensor) -> None:
        """Broadcast what did not fit into the first message, in place."""
        control = self.call.state.control_type
        rest = block[_ROOM_BYTES:]
        if rest.device.type == control:
            self.broadcast(rest)
        else:
            rest.copy_(self.broadcast(rest.to(control)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A tensor to come: where it travels, and its place in the block (None: by itself)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    start: int | None

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def _send(channel: _Channel, obj: object, device: torch.device | str | None) -> object:
    state = channel.call.state
    try:
        text, tensors = encode(obj)
    except (TypeError, ValueError) as error:
        _send_block(channel, _MAGIC_REFUSED, str(error).encode(), [], [])
        raise
    leaves = _lay_out(tensors, [state.transport_type(t.device) for t in tensors])
    table = [[dtype_code(leaf.dtype), leaf.kind, leaf.start, *leaf.shape] for leaf in leaves]
    head = json.dumps([text, table], separators=(",", ":")).encode()
    _send_block(channel, _MAGIC_VALUE, head, tensors, leaves)
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if leaf.start is None:
            channel.broadcast(as_bytes(dense(tensor)).to(leaf.kind))
    own = [t.detach() if device is None else t.detach().to(device) for t in tensors]
    return decode(text, own)


def _send_block(
    channel: _Channel,
    magic: int,
    head: bytes,
    tensors: Sequence[torch.Tensor],
    leaves: Sequence[_Leaf],
) -> None:
    offset = _aligned(len(head))
    ends = [leaf.start + leaf.num_bytes for leaf in leaves if leaf.start is not None]
    block = torch.zeros(offset + max(ends, default=0), dtype=torch.uint8)
    block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if leaf.start is not None and leaf.num_bytes:
            at = offset + leaf.start
            block[at : at + leaf.num_bytes] = as_bytes(dense(tensor))
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    words = torch.tensor([magic, len(head), block.numel()], dtype=torch.int64)
    first[:_HEAD_BYTES] = words.view(torch.uint8)
    inline = block[:_ROOM_BYTES]
    first[_HEAD_BYTES : _HEAD_BYTES + inline.numel()] = inline
    channel.broadcast(first.to(channel.call.state.control_type))
    channel.broadcast_block(block)


def _receive(channel: _Channel, device: torch.device | str | None) -> object:
    state = channel.call.state
    buffer = torch.empty(_FIRST_BYTES, dtype=torch.uint8, device=state.control_type)
    first = channel.broadcast(buffer).cpu()
    magic, head_bytes, block_bytes = first[:_HEAD_BYTES].view(torch.int64).tolist()
    name = (
        f"rank {state.global_rank}: broadcast_nested call {channel.call.number} of group "
        f"{state.ranks} from rank {state.ranks[channel.src]}"
    )
    if magic not in (_MAGIC_VALUE, _MAGIC_REFUSED):
        raise MismatchError(f"{name}: something else arrived; the ranks make different calls")
    block = torch.empty(block_bytes, dtype=torch.uint8)
    inline = block[:_ROOM_BYTES]
    inline.copy_(first[_HEAD_BYTES : _HEAD_BYTES + inline.numel()])
    channel.broadcast_block(block)
    head = bytes_of(block[:head_bytes])
    if magic == _MAGIC_REFUSED:
        raise PeerFailedError(f"{name}: the source refused its value: {head.decode()}")
    text, table = json.loads(head)
    leaves = [
        _Leaf(dtype=DTYPES[code], shape=tuple(shape), kind=kind, start=start)
        for code, kind, start, *shape in table
    ]
    small = block[_aligned(head_bytes) :]
    tensors = []
    for leaf in leaves:
        if leaf.start is None:
            flat = torch.empty(leaf.num_bytes, dtype=torch.uint8, device=leaf.kind)
            channel.broadcast(flat)
        else:
            # A copy, since a view would keep the whole block alive.
            flat = small[leaf.start : leaf.start + leaf.num_bytes].clone().to(leaf.kind)
        tensor = from_bytes(flat, leaf.dtype, leaf.shape)
        tensors.append(tensor if device is None else tensor.to(device))
    return decode(text, tensors)


def _lay_out(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[_Leaf]:
    leaves = []
    start = 0
    for tensor, kind in zip(tensors, kinds, strict=True):
        size = num_bytes(tensor.dtype, tensor.shape)
        alone = size >= _BIG_BYTES
        leaves.append(
            _Leaf(
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                kind=kind,
                start=None if alone else start,
            )
        )
        start += 0 if alone else _aligned(size)
    return leaves


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
