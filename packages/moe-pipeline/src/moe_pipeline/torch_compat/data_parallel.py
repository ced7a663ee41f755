"""Stages wrapped in data parallelism (DDP, FSDP2): gradients are reduced once, after the last W.

A wrapper reduces in the backward of a forward, of which a step has many, and before the weight
gradients that a split backward puts off. So here it only adds up during the step, and what has been
added up goes through its own reduction at the end: buckets, hooks for communication and sharding
are the wrapper's. Modules are reduced in the order given, which is to be the same on every rank.

    with reduced_once([ddp_module, fully_sharded_module]):
        executor.step(inputs, targets)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from moe_pipeline._torch_private import has_run
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.weight_grad import deliver

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
# FSDP2 can end a backward of many parts from torch 2.15 on.
_CAN_FINALIZE = "finalize_backward" in dir(FSDPModule)


def check_wrapper(number: int, module: nn.Module) -> None:
    """Refuse wrappers that cannot wait for the end of a step.

    Raises:
        TypeError: FSDP1, FSDP2 of a torch without `finalize_backward`, a wrapper inside a stage.
        ValueError: DDP with a static graph.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise MoETypeError(
            f"stage {number} is wrapped in FullyShardedDataParallel, which reduces gradients "
            "within the backward of a microbatch; use fully_shard or DistributedDataParallel"
        )
    if isinstance(module, FSDPModule) and not _CAN_FINALIZE:
        raise MoETypeError(
            f"stage {number} is wrapped by fully_shard, and torch {torch.__version__} reduces its "
            "gradients within the backward of a microbatch; use torch 2.15, or "
            "DistributedDataParallel"
        )
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        raise MoEValueError(
            f"stage {number} is in DistributedDataParallel(static_graph=True), which expects one "
            "backward for each forward; leave static_graph out"
        )
    if not isinstance(module, FSDPModule):
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, part in inner.named_modules():
            if isinstance(part, _WRAPPERS):
                raise MoETypeError(
                    f"module {name!r} of stage {number} is wrapped in {type(part).__name__}, but "
                    "not the stage, which has to say when gradients are reduced; wrap the stage too"
                )


def reuses_memory_of_gradients(module: nn.Module) -> bool:
    """Whether a reduction may write where the gradients of an earlier one lie."""
    return isinstance(module, DistributedDataParallel) and module.gradient_as_bucket_view


def reshard(modules: Sequence[nn.Module]) -> None:
    """Let FSDP2 give up what a forward without backward left whole: shares have the gradients."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def reduced_once(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let wrapped modules add up gradients meanwhile, and reduce them at the end; collective.

    After an error nothing is reduced; sharded modules forget what they have added up.
    """
    replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
    sharded: list[FSDPModule] = [m for m in modules if isinstance(m, FSDPModule)]
    held = [(p, p.grad) for m in modules if isinstance(m, FSDPModule) for p in m.parameters()]
    for fsdp in sharded:
        fsdp.set_manual_backward_finalization(True)
        _reduce_in_backward(fsdp, False)
    try:
        with ExitStack() as waiting:
            for ddp in replicated:
                waiting.enter_context(ddp.no_sync())
            yield
    except BaseException:
        for fsdp in sharded:
            if has_run(fsdp):
                fsdp.reset_iter_state()
            fsdp.set_manual_backward_finalization(False)
        for parameter, gradient in held:  # the reset drops those of earlier steps too
            parameter.grad = gradient
        raise
    finally:
        for fsdp in sharded:
            _reduce_in_backward(fsdp, True)
    for ddp in replicated:
        _reduce(ddp)
    for fsdp in sharded:
        fsdp.finalize_backward()
        fsdp.set_manual_backward_finalization(False)


def _reduce_in_backward(module: FSDPModule, does: bool) -> None:
    module.set_requires_gradient_sync(does)
    module.set_reshard_after_backward(does)


def _reduce(module: DistributedDataParallel) -> None:
    """Hand the gradients to DDP as one backward would; a parameter without has one of zeros.

    With `find_unused_parameters` it is told as unused instead.
    """
    leaves: list[Tensor] = []
    gradients: list[Tensor] = []
    for parameter in module.parameters():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None and not module.find_unused_parameters:
            gradient = torch.zeros_like(parameter)
        if gradient is not None and parameter.requires_grad:
            leaves.append(parameter)
            gradients.append(gradient)
    deliver(leaves, gradients, before=lambda root: module.reducer.prepare_for_backward([root]))
    module.require_forward_param_sync = True  # as after any backward that reduces
