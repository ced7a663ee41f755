"""How an executor works, apart from what it runs.

PipelineExecutor(stages, schedule, options=ExecutorOptions(timeout_s=60.0))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_pipeline._checks import check_limit, check_type
from moe_pipeline.errors import MoEValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """Options of `PipelineExecutor`, checked when made.

    Attributes:
        device: where received tensors are put; None: as `recv_tensors` leaves them.
        timeout_s: limit for each transfer, which includes waiting for the other stage to compute;
            None: that of the group.
        gradient_accumulation_fusion: from the second microbatch on, the products of linear layers
            and experts are added in place to the `grad` of their weight. Weights with hooks, or in
            DDP, are left alone (`moe_pipeline.weight_grad.accumulation`).
        alone: with a rank: its neighbours do not exist, groups are not used, and this returns what
            a stage passes to the next one, for memory to be measured in one process, also on fake
            tensors.

    Raises:
        ValueError: a limit that is not positive, or a device that torch does not know.
        TypeError: a value of another type.
    """

    device: torch.device | str | None = None
    timeout_s: float | None = None
    gradient_accumulation_fusion: bool = False
    alone: Callable[[], tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        check_limit("timeout_s", self.timeout_s)
        if isinstance(self.device, str):
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise MoEValueError(f"device={self.device!r}: {error}") from error
        elif self.device is not None:
            check_type("device", self.device, torch.device, str)
