"""What the positions of a microbatch say: where documents begin, and which places hold no token.

Several documents may stand in one row. One begins where its position is 0, and a place of position
-1 is padding: it attends to itself alone (a softmax over nothing is not a number), no token attends
to it, and it is no token for experts and losses. All of this follows from the positions, so nothing
else has to travel through the pipeline; the device is asked once for each microbatch.

    documents = read_documents(position_ids_BS)
    mask_B1SS = documents.mask(window=None)      # None: plain causal attention is the same
    documents.token_idx_N                        # None: no padding

Shape legend: B rows, S positions, N tokens without padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """The positions [B, S] of a microbatch and what they say.

    `has_inner_starts`: some document begins inside a row. `token_idx_N`: int64, the places in
    B * S that are no padding; None where there is none.
    """

    position_ids_BS: Tensor
    has_inner_starts: bool
    token_idx_N: Tensor | None

    def mask(self, window: int | None) -> Tensor | None:
        """Causal inside each document and window, boolean [B, 1, S, S]; None for plain causal.

        Padding at the end of rows of one document needs no mask: no token comes after it.
        """
        positions_BS = self.position_ids_BS
        length = positions_BS.shape[1]
        has_window = window is not None and window < length
        if not self.has_inner_starts and not has_window:
            return None
        document_BS = self.numbers()
        allowed_BSS = (document_BS[:, :, None] == document_BS[:, None, :]).tril()
        return (allowed_BSS.triu(1 - window) if has_window and window else allowed_BSS)[:, None]

    def numbers(self) -> Tensor:
        """The number of each place's document, int64 [B, S]; each place of padding has its own."""
        positions_BS = self.position_ids_BS
        document_BS = (positions_BS == 0).cumsum(dim=1)
        own_S = torch.arange(-positions_BS.shape[1], 0, device=positions_BS.device)
        return document_BS.where(positions_BS >= 0, own_S)


def added_mask(mask_B1SP: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same as what is added to scores: 0, or minus infinity; for torch's kernels, which would
    make it of a boolean mask in each layer, and keep it there for the backward.
    """
    if mask_B1SP is None:
        return None
    nothing = torch.zeros((), dtype=dtype, device=mask_B1SP.device)
    return nothing.masked_fill(~mask_B1SP, -torch.inf)


def read_documents(position_ids_BS: Tensor) -> Documents:
    """Ask the device, once, what the positions [B, S] hold."""
    is_padding_BS = position_ids_BS < 0
    facts = torch.stack(((position_ids_BS[:, 1:] == 0).any(), is_padding_BS.any()))
    has_inner_starts, has_padding = facts.tolist()
    return Documents(
        position_ids_BS,
        has_inner_starts,
        token_places(position_ids_BS) if has_padding else None,
    )


def token_places(position_ids_BS: Tensor) -> Tensor:
    """The places in B * S that are no padding, int64 [N]; waits for the device."""
    return (position_ids_BS.flatten() >= 0).nonzero().flatten()


def document_lengths(position_ids_BS: Tensor) -> Tensor:
    """For each place the length of its document as far as the row holds it, int64 [B, S].

    A document that began before the row counts from its own position 0. Padding: 0.
    """
    document_BS = (position_ids_BS == 0).cumsum(dim=1)
    shape = (position_ids_BS.shape[0], position_ids_BS.shape[1] + 1)
    last_BD = position_ids_BS.new_full(shape, -1)
    last_BD = last_BD.scatter_reduce(1, document_BS, position_ids_BS, "amax")
    return (last_BD.gather(1, document_BS) + 1).where(position_ids_BS >= 0, 0)
