"""What a dispatch leaves behind for its combine, and for a later dispatch of the same choices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import Argument
from comm_collectives.errors import CommValueError
from comm_collectives.moe.routes import Routing
from comm_collectives.moe.rows import Payload, SortedChoices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """What combine needs of a dispatch. Opaque; also for `MoeOptions.reuse`.

    Attributes:
        layout: the arguments on which the order of rows depends.
        back_payload: as what the gradients of rows travel.
        state: None where nothing is exchanged.
        number: that of the dispatch among the calls of its group, 0 where nothing is exchanged.
        anchor: an empty tensor that ties the combine to the dispatch in the graph.
    """

    routing: Routing
    choices: SortedChoices
    layout: Sequence[Argument]
    back_payload: Payload
    state: GroupState | None
    number: int
    num_rows: int
    timeout_s: float | None
    anchor: torch.Tensor

    def check_reused(
        self, layout: Sequence[Argument], state: GroupState | None, topk_idx_TK: torch.Tensor
    ) -> None:
        """Check that a dispatch may take over the layout of this one.

        Raises:
            ValueError: they differ in something.
        """
        for then, now in zip(self.layout, layout, strict=True):
            if now != then:
                raise CommValueError(
                    f"options.reuse is of a dispatch with {then}, but here it is "
                    f"{now.text or now.word}; dispatch without reuse"
                )
        if state is not self.state:
            raise CommValueError(
                "options.reuse is of a dispatch over another group; dispatch without reuse"
            )
        if not self.choices.describes(topk_idx_TK):
            raise CommValueError(
                "options.reuse is of a dispatch with other choices than this topk_idx of shape "
                f"{tuple(topk_idx_TK.shape)}; dispatch without reuse"
            )
