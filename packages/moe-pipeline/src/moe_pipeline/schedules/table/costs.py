"""What a stage's work takes: the numbers behind a simulation or a plan.

Units are the caller's: seconds and bytes when measured, slots and microbatches when compared with
a paper's table. The defaults are the papers' T_F = T_I = T_W = 1 without communication, and one
activation unit for each stage and microbatch, held from F to W.

    thirds = StageCosts(forward_s=0.5, input_gradient_s=0.5, weight_gradient_s=0.5)
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from moe_pipeline._checks import check_finite, check_type
from moe_pipeline.errors import MoEValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Time and memory of one microbatch on one stage.

    Attributes:
        forward_s: time of F.
        input_gradient_s: time of I.
        weight_gradient_s: time of W; a whole backward B takes I + W.
        forward_transfer_s: until the next stage, on another rank, has the outputs.
        backward_transfer_s: until the previous stage, on another rank, has the gradients.
        activation_bytes: held from the start of F to the end of I or B.
        weight_gradient_bytes: those among them that stay from I until W; None: all.

    Raises:
        ValueError: a negative or infinite number, or more left to W than there was.
    """

    forward_s: float = 1.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    forward_transfer_s: float = 0.0
    backward_transfer_s: float = 0.0
    activation_bytes: int = 1
    weight_gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_finite(field.name, value)
        if self.left_for_weights > self.activation_bytes:
            raise MoEValueError(
                f"weight_gradient_bytes={self.weight_gradient_bytes} exceeds "
                f"activation_bytes={self.activation_bytes}, of which it is a part"
            )

    @property
    def left_for_weights(self) -> int:
        """`weight_gradient_bytes`, resolved."""
        kept = self.weight_gradient_bytes
        return self.activation_bytes if kept is None else kept


def costs_of_stages(
    costs: StageCosts | Sequence[StageCosts], num_stages: int
) -> tuple[StageCosts, ...]:
    """One for each stage; a single one stands for all."""
    if isinstance(costs, StageCosts):
        return (costs,) * num_stages
    check_type("costs", costs, StageCosts, Sequence)
    if len(costs) != num_stages:
        raise MoEValueError(f"expected costs of {num_stages} stages, got {len(costs)}")
    for stage, each in enumerate(costs):
        check_type(f"costs[{stage}]", each, StageCosts)
    return tuple(costs)
