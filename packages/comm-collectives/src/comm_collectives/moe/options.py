"""How dispatch and combine travel: the route, what a row becomes on the wire, limits.

Every field must be the same on every rank of the group, except `timeout_s`.

    options = MoeOptions(route="hierarchical", ranks_per_node=8, payload="float8_e4m3")
    sent = dispatch(x, topk_idx, topk_weights, num_experts=256, group=group, options=options)
"""

from dataclasses import dataclass
from typing import Literal, get_args

from comm_collectives.call.groups import check_integer, check_timeout
from comm_collectives.errors import CommValueError
from comm_collectives.moe.deepep import DeepEpBackend
from comm_collectives.moe.handle import DispatchHandle
from comm_collectives.moe.rows import Payload
from comm_collectives.planning.wire import Route

MoeBackend = Literal["torch"] | DeepEpBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeOptions:
    """Options of `dispatch`, and of the combine and the backwards that follow it.

    Attributes:
        route: "flat" sends one row per routed choice, straight to the expert's rank, and is the
            fastest on a fast wire. "dedup" sends one row per token and rank, whatever the number of
            its experts there; the sums of `combine` are then taken per rank first.
            "hierarchical" sends one row per token and node, which is forwarded inside the node.
            The experts see the same rows in the same order on every route.
        ranks_per_node: for "hierarchical": a node is that many consecutive ranks of the group, a
            divisor of its size. Not used by a group of one rank.
        payload: "full" sends rows as they are. "float8_e4m3" and "int8" send one byte per element
            and a scale per block of 128, in the forward of `dispatch`; the gradient passes straight
            through. One rank alone rounds the same rows, so its results are those of many.
        quantize_backward: gradients of rows travel in `payload` too, in both exchanges of the
            backward; they are summed in full after each transfer.
        backend: "torch" runs over any process group. A `DeepEpBackend` moves rows with DeepEP's
            kernels and buffer, which de-duplicate and forward by themselves: route "flat", payload
            "full". Not used by a group of one rank.
        timeout_s: limit in seconds of each exchange, also in the backward and for `combine`; None
            is the group's own limit.
        reuse: the handle of an earlier dispatch of the same choices, with the same options, such as
            the one that an activation recompute repeats: the counts are not exchanged again. Every
            rank reuses the same dispatch, or none. Holding a handle keeps its graph alive.

    Raises:
        ValueError: a field is out of its range, or fits no other.
        TypeError: a field that is a number is none.
    """

    route: Route = "flat"
    ranks_per_node: int | None = None
    payload: Payload = "full"
    quantize_backward: bool = False
    backend: MoeBackend = "torch"
    timeout_s: float | None = None
    reuse: DispatchHandle | None = None

    def __post_init__(self) -> None:
        for name, kind in (("route", Route), ("payload", Payload)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise CommValueError(f"{name}={value!r} is unknown; choose of {list(known)}")
        check_timeout(self.timeout_s)
        self._check_nodes()
        self._check_backend()
        if self.quantize_backward and self.payload == "full":
            raise CommValueError(
                "quantize_backward needs a quantised payload, but payload='full'; "
                "choose payload='float8_e4m3' or 'int8'"
            )
        if self.reuse is not None and not isinstance(self.reuse, DispatchHandle):
            raise CommValueError(
                f"reuse is a {type(self.reuse).__name__}; give the handle of an earlier dispatch"
            )

    @property
    def back_payload(self) -> Payload:
        """As what gradients of rows travel."""
        return self.payload if self.quantize_backward else "full"

    def _check_nodes(self) -> None:
        if self.ranks_per_node is not None:
            check_integer(self.ranks_per_node, "ranks_per_node")
        if self.route == "hierarchical":
            if self.ranks_per_node is None or self.ranks_per_node < 1:
                raise CommValueError(
                    f"route='hierarchical' needs ranks_per_node >= 1, not {self.ranks_per_node}; "
                    "give the number of ranks on each node"
                )
        elif self.ranks_per_node is not None:
            raise CommValueError(
                f"ranks_per_node={self.ranks_per_node} is for route='hierarchical', but "
                f"route={self.route!r}; leave it out"
            )

    def _check_backend(self) -> None:
        if isinstance(self.backend, DeepEpBackend):
            if self.route != "flat" or self.payload != "full":
                raise CommValueError(
                    f"route={self.route!r} and payload={self.payload!r} are for backend='torch'; "
                    "DeepEP de-duplicates by itself: leave route and payload out"
                )
        elif self.backend != "torch":
            raise CommValueError(f"backend={self.backend!r} is unknown: 'torch' or a DeepEpBackend")


DEFAULT_OPTIONS = MoeOptions()
