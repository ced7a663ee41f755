"""How tokens travel to the experts in a job: its keys as moe-pipeline's options.

dispatch_options(config, model)             # ValueError: names the key and the remedy
dispatch_options(config, model, ep_group)   # on a rank: with DeepEP's buffer, if that is asked for
"""

import math
import os
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from comm_collectives import MoeOptions
from comm_collectives.moe.deepep import DeepEpBackend
from moe_pipeline.layer import DispatchOptions
from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig

_DEEPEP_ELEMENTS = 8  # of bfloat16, which its kernels load at once


def dispatch_options(
    config: Config, model: DecoderConfig, ep_group: dist.ProcessGroup | None = None
) -> DispatchOptions:
    """The options of every layer with experts; pure without `ep_group`.

    Args:
        ep_group: of this rank; collective over it where DeepEP moves rows, which then has a buffer
            for the group. None: only check.

    Raises:
        ValueError: nodes that do not divide the ep ranks, a shared expert that is not there, or
            what DeepEP cannot do here.
    """
    moe = config.moe
    if moe.shared_expert_overlap and model.moe.shared_expert is None:
        raise TrainValueError(
            f"moe.shared_expert_overlap=true, but model_type={model.model_type!r} with this "
            "config.json has no shared expert; leave it out, or overlap by moe.dispatch_chunks=2"
        )
    if moe.dispatch_backend == "deepep":
        _check_deepep(config, model)
    by_deepep = moe.dispatch_backend == "deepep" and ep_group is not None and config.parallel.ep > 1
    transport = MoeOptions(
        backend=_deepep(model, ep_group) if by_deepep and ep_group is not None else "torch",
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
    """Ep ranks on a node of the hierarchical route; they are every etp-th rank of the job."""
    if config.moe.dispatch_route != "hierarchical":
        return None
    ep, given = config.parallel.ep, config.moe.dispatch_ranks_per_node
    if given is None:
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size))
        return math.gcd(ep, max(1, on_node // config.parallel.etp))
    if ep % given:
        choices = ", ".join(str(n) for n in range(1, ep + 1) if ep % n == 0)
        raise TrainValueError(
            f"moe.dispatch_ranks_per_node={given} does not divide parallel.ep={ep}; choose among "
            f"{choices}, or leave it out"
        )
    return given


def _check_deepep(config: Config, model: DecoderConfig) -> None:
    asked = 'moe.dispatch_backend="deepep"'
    if find_spec("deep_ep") is None:
        raise TrainValueError(
            f"{asked} needs the package deep_ep, which is not installed; build it from "
            "github.com/deepseek-ai/DeepEP on every machine, or leave the key out"
        )
    if config.train.device == "cpu" or not torch.cuda.is_available():
        raise TrainValueError(
            f'{asked} moves rows between CUDA devices, but train.device="{config.train.device}" '
            "and this machine mean the CPU; leave the key out"
        )
    if config.train.dtype != "bfloat16":
        raise TrainValueError(
            f'{asked} moves bfloat16 rows, not those of train.dtype="{config.train.dtype}"; set '
            'train.dtype="bfloat16"'
        )
    if model.hidden_size % _DEEPEP_ELEMENTS:
        raise TrainValueError(
            f"{asked} takes rows in multiples of {_DEEPEP_ELEMENTS}, but hidden_size="
            f"{model.hidden_size}; leave the key out"
        )


def _deepep(model: DecoderConfig, group: dist.ProcessGroup) -> DeepEpBackend:
    """A buffer that is as large as DeepEP says for this group and these rows. Collective."""
    buffer = import_module("deep_ep").Buffer
    row_bytes, size = model.hidden_size * torch.bfloat16.itemsize, group.size()
    hints = [buffer.get_dispatch_config(size), buffer.get_combine_config(size)]
    nvlink = max(hint.get_nvl_buffer_size_hint(row_bytes, size) for hint in hints)
    rdma = max(hint.get_rdma_buffer_size_hint(row_bytes, size) for hint in hints)
    return DeepEpBackend(buffer(group, nvlink, rdma))
