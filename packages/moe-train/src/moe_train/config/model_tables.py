"""The tables that say which model is trained, and how its experts are balanced.

model.source        # where the decoder is described
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Table):
    """Which model is trained."""

    table: ClassVar[str] = "model"
    config_file: str | None = key(
        "path of the model's config.json as transformers writes it; not used with init_from",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    init_from: str | None = key(
        "folder of a checkpoint to start from, in any format of its family that weight-convert "
        "knows; absent: random weights",
        default=None,
        unit=PATH,
        on_resume="compared",
    )
    experts_implementation: Literal["auto", "fused", "grouped_mm", "loop"] = key(
        "how the experts' matrix products are computed; auto picks the fastest for the device",
        default="auto",
        on_resume="free",
    )

    experts_fp8: bool = key(
        "products of the experts' forward take fp8 operands, one scale for each row (CUDA, compute "
        'capability 9.0 or more, train.dtype="bfloat16")',
        default=False,
        on_resume="asked",
    )

    @property
    def source(self) -> str:
        """Where the model is described: `init_from` if it is given, else `config_file`."""
        return str(self.config_file if self.init_from is None else self.init_from)

    def _check(self) -> None:
        if self.config_file is None and self.init_from is None:
            raise TrainValueError(
                "[model] names no model; set model.config_file to a config.json, or "
                "model.init_from to a folder that holds one"
            )
        if self.experts_fp8 and self.experts_implementation != "auto":
            raise TrainValueError(
                "model.experts_fp8=true has an implementation of its own, not "
                f'model.experts_implementation="{self.experts_implementation}"; leave one of them '
                "out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTable(Table):
    """Balancing, capacity and ways to the experts; routers compute in fp32 in any train.dtype."""

    table: ClassVar[str] = "moe"
    aux_loss_scope: Literal["microbatch", "sequence", "global_batch"] = key(
        "tokens over which the load-balancing loss takes its means: a global microbatch, each "
        "sequence, or all microbatches of a step (only with parallel.schedule="
        '"forward_then_backward" or one microbatch)',
        default="microbatch",
        on_resume="asked",
    )
    aux_loss_coef: float | None = key(
        "factor of the load-balancing loss, 0 for none; absent: that of config.json "
        "(router_aux_loss_coef)",
        default=None,
        minimum=0,
        on_resume="asked",
    )
    z_loss_coef: float = key(
        "factor of the mean squared logsumexp of the router's logits; 0 for none",
        default=0.0,
        minimum=0,
        on_resume="asked",
    )
    capacity_factor: float | None = key(
        "most tokens of an expert, over an even share of the global microbatch; absent: no limit",
        default=None,
        above=0,
        on_resume="asked",
    )
    token_drop_policy: Literal["probs", "position"] = key(
        "which tokens a full expert keeps: the most probable or the first ones",
        default="probs",
        on_resume="asked",
    )
    update_expert_bias: bool = key(
        "balance without a loss: move the bias that chooses experts towards even load after each "
        "step (families with e_score_correction_bias)",
        default=False,
        on_resume="asked",
    )
    expert_bias_update_rate: float = key(
        "how far the expert bias moves in a step", default=1e-3, above=0, on_resume="asked"
    )
    dispatch_route: Literal["flat", "dedup", "hierarchical"] = key(
        "how rows travel between ep ranks: one for each chosen expert; one for each token and "
        "rank; or one for each token and node, which hands it on",
        default="flat",
        on_resume="free",
    )
    dispatch_backend: Literal["torch", "deepep"] = key(
        "what moves rows between ep ranks: torch's process groups, or DeepEP's kernels, which have "
        'a route of their own (package deep_ep; CUDA, train.dtype="bfloat16")',
        default="torch",
        on_resume="free",
    )
    dispatch_ranks_per_node: int | None = key(
        'consecutive ep ranks that make a node of dispatch_route="hierarchical"; absent: those of '
        "one machine",
        unit="ranks",
        default=None,
        minimum=1,
        on_resume="free",
    )
    dispatch_payload: Literal["full", "float8_e4m3", "int8"] = key(
        "as what rows travel to the experts: as they are, or in a byte for each element and a "
        "scale for each 128 of them; one rank alone rounds the same",
        default="full",
        on_resume="asked",
    )
    dispatch_quantize_backward: bool = key(
        "gradients of rows travel in dispatch_payload too", default=False, on_resume="asked"
    )
    dispatch_chunks: int = key(
        "into how many parts a rank's tokens are cut, of which one travels while the experts of "
        "another compute; 1: all at once",
        default=1,
        minimum=1,
        on_resume="free",
    )
    shared_expert_overlap: bool = key(
        "compute the shared expert while the tokens are on their way to the others",
        default=False,
        on_resume="free",
    )
    record_routing: str | None = key(
        "folder that gets the experts that the tokens of every step choose, for replay_routing; "
        "2 bytes for each choice and layer; absent: none",
        default=None,
        unit=PATH,
        on_resume="free",
    )
    replay_routing: str | None = key(
        "folder that a run with record_routing has written: tokens go to the experts that they "
        "chose there, in any layout and format of numbers; absent: they choose",
        default=None,
        unit=PATH,
        on_resume="asked",
    )

    def _check(self) -> None:
        if self.record_routing is not None and self.record_routing == self.replay_routing:
            raise TrainValueError(
                f"moe.record_routing and moe.replay_routing are both {self.record_routing}, which "
                "would be overwritten; name two folders, or leave one out"
            )
        if self.dispatch_ranks_per_node is not None and self.dispatch_route != "hierarchical":
            raise TrainValueError(
                f"moe.dispatch_ranks_per_node={self.dispatch_ranks_per_node} is for "
                f'moe.dispatch_route="hierarchical", not "{self.dispatch_route}"; leave it out'
            )
        if self.dispatch_backend == "deepep" and (
            self.dispatch_route != "flat" or self.dispatch_payload != "full"
        ):
            raise TrainValueError(
                'moe.dispatch_backend="deepep" de-duplicates by itself and moves rows as they are, '
                f'not moe.dispatch_route="{self.dispatch_route}" with moe.dispatch_payload='
                f'"{self.dispatch_payload}"; leave these out'
            )
        if self.dispatch_quantize_backward and self.dispatch_payload == "full":
            raise TrainValueError(
                'moe.dispatch_quantize_backward=true needs moe.dispatch_payload="float8_e4m3" or '
                '"int8", not "full"; choose one, or leave it out'
            )
        if self.dispatch_chunks > 1 and self.shared_expert_overlap:
            raise TrainValueError(
                f"moe.dispatch_chunks={self.dispatch_chunks} hides the way of some tokens behind "
                "the experts of others, moe.shared_expert_overlap=true behind the shared expert; "
                "choose one of them"
            )
