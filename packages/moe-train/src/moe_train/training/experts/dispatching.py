"""How tokens travel to the experts in a job: its keys as moe-pipeline's options; pure.

dispatch_options(config, model)     # ValueError: names the key and the remedy
"""

import math
import os

from comm_collectives import MoeOptions
from moe_pipeline.layer import DispatchOptions
from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig


def dispatch_options(config: Config, model: DecoderConfig) -> DispatchOptions:
    """The options of every layer with experts.

    Raises:
        ValueError: nodes that do not divide the ep ranks, or a shared expert that is not there.
    """
    moe = config.moe
    if moe.shared_expert_overlap and model.moe.shared_expert is None:
        raise TrainValueError(
            f"moe.shared_expert_overlap=true, but model_type={model.model_type!r} with this "
            "config.json has no shared expert; leave it out, or overlap by moe.dispatch_chunks=2"
        )
    transport = MoeOptions(
        route=moe.dispatch_route,
        ranks_per_node=_ranks_per_node(config),
        payload=moe.dispatch_payload,
        quantize_backward=moe.dispatch_quantize_backward,
    )
    return DispatchOptions(
        transport=transport,
        num_chunks=moe.dispatch_chunks,
        overlaps_shared_expert=moe.shared_expert_overlap,
    )


def _ranks_per_node(config: Config) -> int | None:
    """Ranks of a node of the hierarchical route; ep ranks are consecutive ranks of the job."""
    if config.moe.dispatch_route != "hierarchical":
        return None
    ep, given = config.parallel.ep, config.moe.dispatch_ranks_per_node
    if given is None:
        return math.gcd(ep, int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size)))
    if ep % given:
        choices = ", ".join(str(n) for n in range(1, ep + 1) if ep % n == 0)
        raise TrainValueError(
            f"moe.dispatch_ranks_per_node={given} does not divide parallel.ep={ep}; choose among "
            f"{choices}, or leave it out"
        )
    return given
