"""How a layer's tokens travel to their experts and back, and what is computed meanwhile.

    options = DispatchOptions(transport=MoeOptions(route="dedup"), num_chunks=2)
    layer = MoELayer(config, groups=groups, dispatch=options)

Invariant: what a layer returns depends on none of these options but `transport.payload`, up to the
order of sums. In chunks, the experts of some tokens run while the rows of the others travel; with
`overlaps_shared_expert` the shared expert runs while all rows do.

Dims: T tokens of this rank, R routed rows received, D wide, K choices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives import MoeOptions, combine, dispatch
from comm_collectives.moe import Dispatched, DispatchHandle, OverlappedMoe, dispatch_async
from moe_pipeline._checks import check_count, check_type
from moe_pipeline.errors import MoEValueError
from moe_pipeline.layer.expert_slots import ExpertSlots

_DIRECT = MoeOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How rows travel; the same on every rank of a layer's ep group, and of no use without one.

    Attributes:
        transport: route, payload and backend of comm-collectives; `reuse` and `timeout_s` are the
            layer's own. A quantised payload rounds the rows on one rank too.
        num_chunks: a rank's tokens travel in so many parts, beside the experts of the part before.
            In a recompute the counts of each part are exchanged again.
        overlaps_shared_expert: the shared expert runs while the tokens are on their way.

    Raises:
        ValueError: `num_chunks` below 1, several chunks and an overlapping shared expert, or a
            transport with `reuse` or `timeout_s`.
    """

    transport: MoeOptions = _DIRECT
    num_chunks: int = 1
    overlaps_shared_expert: bool = False

    def __post_init__(self) -> None:
        check_type("transport", self.transport, MoeOptions)
        check_count("num_chunks", self.num_chunks)
        check_type("overlaps_shared_expert", self.overlaps_shared_expert, bool)
        if self.num_chunks > 1 and self.overlaps_shared_expert:
            raise MoEValueError(
                f"num_chunks={self.num_chunks} hides the way of a chunk behind the experts of "
                "another, overlaps_shared_expert=True behind the shared expert; choose one of them"
            )
        if self.transport.reuse is not None or self.transport.timeout_s is not None:
            raise MoEValueError(
                "transport.reuse and transport.timeout_s are given by the layer and its groups; "
                "leave them out"
            )

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded on their way, and so on a rank alone as well."""
        return self.transport.payload != "full"


TOGETHER = DispatchOptions()
"""All rows at once, straight to their experts, as they are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenExchange:
    """One layer's way through the ranks of its ep group.

    Attributes:
        options: how rows travel.
        num_experts: of the layer.
        parts: experts of each rank of the group; None: as many on each.
        num_local_experts: of this rank.
        group: ranks that share them; None: this one has all.
        timeout_s: limit of each exchange; None: that of the group.
    """

    options: DispatchOptions
    num_experts: int
    parts: tuple[int, ...] | None
    num_local_experts: int
    group: ProcessGroup | None
    timeout_s: float | None
    _slots: ExpertSlots | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        slots = None if self.parts is None else ExpertSlots.of(self.parts)
        object.__setattr__(self, "_slots", slots)

    @property
    def in_chunks(self) -> bool:
        """Whether tokens travel in several parts, each with a handle of its own."""
        return self.options.num_chunks > 1 and self.group is not None

    def all_at_once(
        self,
        routed: tuple[Tensor, Tensor, Tensor],
        experts: Callable[[Dispatched], Tensor],
        *,
        reuse: DispatchHandle | None,
        keep: Callable[[DispatchHandle], None],
        beside: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' sums [T, D], and what `beside` returned. Collective over the group.

        Args:
            routed: rows [T, D], their choices [T, K] and weights [T, K].
            experts: weighted results [R, D] of the rows that have come.
            reuse: of an earlier dispatch of the same choices.
            keep: called with the dispatch's handle before the experts run.
            beside: computed while rows are on their way.
        """
        rows_TD, topk_idx_TK, weights_TK = self._numbered(routed)
        options = replace(self.options.transport, timeout_s=self.timeout_s, reuse=reuse)
        send = dispatch if beside is None else dispatch_async
        sent = send(
            rows_TD,
            topk_idx_TK,
            weights_TK,
            num_experts=self._num_numbers,
            group=self.group,
            options=options,
        )
        out = None if beside is None else beside()
        dispatched = sent if isinstance(sent, Dispatched) else sent.wait()
        keep(dispatched.handle)
        rows = experts(self._of_local(dispatched))
        return combine(rows, dispatched.handle, timeout_s=self.timeout_s), out

    def chunk_by_chunk(
        self, routed: tuple[Tensor, Tensor, Tensor], experts: Callable[[Dispatched], Tensor]
    ) -> Tensor:
        """The same sums [T, D], the ways of some rows beside the experts of others. Collective."""
        overlapped = OverlappedMoe(
            num_experts=self._num_numbers,
            group=self.group,
            num_chunks=self.options.num_chunks,
            options=replace(self.options.transport, timeout_s=self.timeout_s),
        )
        return overlapped(*self._numbered(routed), lambda rows: experts(self._of_local(rows)))

    @property
    def _num_numbers(self) -> int:
        return self.num_experts if self._slots is None else self._slots.total

    def _numbered(self, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, choices and weights, with experts as the exchange numbers them."""
        if self._slots is None:
            return routed
        rows_TD, topk_idx_TK, weights_TK = routed
        return rows_TD, self._slots.numbers(topk_idx_TK), weights_TK

    def _of_local(self, dispatched: Dispatched) -> Dispatched:
        """What has come, with the counts of the experts that are there."""
        if self._slots is None:
            return dispatched
        counts = dispatched.num_tokens_per_expert[: self.num_local_experts]
        return replace(dispatched, num_tokens_per_expert=counts)
