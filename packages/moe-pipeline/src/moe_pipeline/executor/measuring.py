"""What one microbatch of a stage takes, measured on the stage alone, for simulator and planner.

costs = measure_costs(stage, inputs, split=True)
schedule = plan([costs] * 8, num_ranks=4, num_microbatches=16, memory_cap_bytes=budget)
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_pipeline.executor.memory_track import MemoryTrack
from moe_pipeline.executor.microbatch_state import MicrobatchState
from moe_pipeline.executor.pytrees import map_tensors
from moe_pipeline.executor.stage_io import Stage, gate_output
from moe_pipeline.executor.stage_message import activations
from moe_pipeline.schedules.table import Action, Kind, StageCosts
from moe_pipeline.weight_grad import WeightGradStore, split_backward


def measure_costs(
    stage: Stage,
    inputs: Sequence[Any],
    *,
    target: object | None = None,
    is_first: bool = False,
    split: bool = False,
) -> StageCosts:
    """Run a forward and a backward of the stage, and count the bytes that its graph keeps.

    The gradients of an `nn.Module` and the random state are put back afterwards; buffers are the
    stage's own affair. The stage's collectives run, so all their ranks have to call this.

    Args:
        stage: the stage alone.
        inputs: its positional inputs for one microbatch.
        target: as in a step.
        is_first: the inputs are the model's and the caller's; otherwise those of a floating dtype
            want a gradient, and belong to the stage.
        split: whether the schedule splits its backward into I and W.

    Returns:
        Times of 1; `activation_bytes`, and with `split` the `weight_gradient_bytes` among them.
    """
    track, state = (
        MemoryTrack(),
        MicrobatchState(store=WeightGradStore() if split else None),
    )
    parameters = list(stage.parameters()) if isinstance(stage, nn.Module) else []
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # autograd would add to it in place
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            _forward(stage, tuple(inputs) if is_first else _own(inputs), target, state, track)
            track.after(Action(0, Kind.FORWARD, 0))
            _backward(state, track)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    track.finish()
    kept, left = (num_bytes for _, num_bytes in track.timeline[:2])
    return StageCosts(activation_bytes=kept, weight_gradient_bytes=left if split else None)


def _own(inputs: Sequence[Any]) -> tuple[Any, ...]:
    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.is_floating_point())

    return tuple(map_tensors(fresh, tuple(inputs)))


def _forward(
    stage: Stage,
    inputs: tuple[Any, ...],
    target: object | None,
    state: MicrobatchState,
    track: MemoryTrack,
) -> None:
    splitting = nullcontext() if state.store is None else split_backward(state.store)
    with track.forward((0, 0)), splitting:
        output = stage(*inputs, target=target)
    _, wanting = activations(output.tensors)
    state.roots = [gate_output(tensor) for tensor in wanting]
    state.loss = output.loss
    state.put_output_gradients([torch.ones_like(tensor) for tensor in wanting])


def _backward(state: MicrobatchState, track: MemoryTrack) -> None:
    with nullcontext() if state.store is None else state.store.deferring():
        state.run_backward()
    if state.store is None:
        track.after(Action(0, Kind.BACKWARD, 0))
        return
    track.after(Action(0, Kind.INPUT_GRADIENT, 0))
    state.store.run()
    track.after(Action(0, Kind.WEIGHT_GRADIENT, 0))
