"""Keys and values of the tokens so far, so that generation computes each token once.

The rows of a batch may differ in length: they are padded on the left, and a padding token has
position -1. It is attended to by no other token and attends to itself alone, so that a row has the
values that it has without padding. Buffers grow in blocks of positions; a layer with a window
keeps all of them, and the mask leaves out what lies further back.

    cache = KeyValueCache()
    stage.hidden_states(input_ids_BS, position_ids_BS, cache)         # the prompts, [-1, 0, 1, 2]
    stage.hidden_states(next_B1, position_ids_BS[:, -1:] + 1, cache)  # a token of each row
    cache.keep(rows)                                                  # go on with these rows only

Shape legend: B sequences, S positions of a call, P positions with those in the cache, K key/value
heads, D head dim.
"""

from typing import final

import torch
from torch import Tensor

BLOCK_POSITIONS = 128
"""Buffers hold a multiple of this many positions."""


@final
class KeyValueCache:
    """Keys and values per layer, and the positions of all tokens; one document in each row."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._positions_BP: Tensor | None = None
        self._has_padding = False

    @property
    def num_cached(self) -> int:
        """Positions that every layer holds; 0 before the first call."""
        return min(self._lengths.values(), default=0)

    @property
    def has_padding(self) -> bool:
        """Whether some row of the first call had padding."""
        return self._has_padding

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append this call's keys and values and return all of the layer's, as views [B, K, P, D].

        The views hold until the next call.
        """
        start = self._lengths.get(layer, 0)
        end = start + k_BKSD.shape[2]
        buffers = self._layers.setdefault(layer, [x[:, :, :0] for x in (k_BKSD, v_BKSD)])
        for which, fresh in enumerate((k_BKSD, v_BKSD)):
            if end > buffers[which].shape[2]:
                buffers[which] = _grown(buffers[which], start, end)
            buffers[which][:, :, start:end] = fresh
        self._lengths[layer] = end
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def add_positions(self, position_ids_BS: Tensor) -> Tensor:
        """Note the positions of the tokens of a call; returns those of all tokens, [B, P]."""
        before = self._positions_BP
        if before is None:
            # Asked once for each batch: the tokens that follow are none of padding.
            self._has_padding = bool((position_ids_BS < 0).any())
        parts = [position_ids_BS] if before is None else [before, position_ids_BS]
        self._positions_BP = torch.cat(parts, dim=1)
        return self._positions_BP

    def mask(self, position_ids_BS: Tensor, window: int | None) -> Tensor | None:
        """Where the tokens noted last may attend: boolean [B, 1, S, P]; None: plain causal."""
        positions_BP = position_ids_BS if self._positions_BP is None else self._positions_BP
        length, total = position_ids_BS.shape[1], positions_BP.shape[1]
        is_bounded = window is not None and window < total
        if not self._has_padding and not is_bounded and length in (1, total):
            return None
        return continued_mask(position_ids_BS, positions_BP, window)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, in this order.

        Args:
            rows: int64 [B'], on the device of the cache.
        """
        self._layers = {
            layer: [buffer.index_select(0, rows) for buffer in buffers]
            for layer, buffers in self._layers.items()
        }
        if self._positions_BP is not None:
            self._positions_BP = self._positions_BP.index_select(0, rows)


def continued_mask(queries_BS: Tensor, keys_BP: Tensor, window: int | None) -> Tensor:
    """Where tokens may attend whose keys stand last among all keys: boolean [B, 1, S, P].

    Args:
        queries_BS: positions of the tokens, -1 for padding.
        keys_BP: positions of all tokens of the row, `queries_BS` last.
        window: a token attends to itself and `window - 1` tokens before it; None: to all.
    """
    behind_BSP = queries_BS[:, :, None] - keys_BP[:, None, :]
    allowed_BSP = (behind_BSP >= 0) & (keys_BP >= 0)[:, None, :]
    if window is not None:
        allowed_BSP &= behind_BSP < window
    length, total = queries_BS.shape[1], keys_BP.shape[1]
    # Padding attends to itself: a softmax over nothing is not a number.
    itself_SP = torch.ones(length, total, dtype=torch.bool, device=queries_BS.device)
    return (allowed_BSP | itself_SP.tril(total - length).triu(total - length))[:, None]


def _grown(buffer: Tensor, start: int, end: int) -> Tensor:
    """A buffer for `end` positions and the rest of a block, with the first `start` of the old."""
    size = -(-end // BLOCK_POSITIONS) * BLOCK_POSITIONS
    larger = buffer.new_empty(*buffer.shape[:2], size, buffer.shape[3])
    larger[:, :, :start] = buffer[:, :, :start]
    return larger
