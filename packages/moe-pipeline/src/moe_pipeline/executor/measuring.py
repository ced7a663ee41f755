"""What one microbatch of a stage takes, measured on the stage alone, for simulator and planner.

costs = measure_costs(stage, inputs, split=True, rounds=2)
schedule = plan([costs] * 8, num_ranks=4, num_microbatches=16, memory_cap_bytes=budget)
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from moe_pipeline.executor.memory_track import MemoryTrack
from moe_pipeline.executor.microbatch_state import MicrobatchState
from moe_pipeline.executor.pytrees import flatten, map_tensors
from moe_pipeline.executor.stage_io import Stage, gate_output
from moe_pipeline.executor.stage_message import activations
from moe_pipeline.schedules.table import Action, Kind, StageCosts
from moe_pipeline.weight_grad import InPlaceAccumulation, WeightGradStore, split_backward


def measure_costs(
    stage: Stage,
    inputs: Sequence[Any],
    *,
    target: object | None = None,
    is_first: bool = False,
    split: bool = False,
    rounds: int = 0,
) -> StageCosts:
    """Run a forward and a backward of the stage, and count the bytes that its graph keeps.

    With `rounds` the host waits for the devices of the inputs. The gradients of an `nn.Module` and
    the random state are put back afterwards; buffers are the stage's own affair. The stage's
    collectives run, so all their ranks have to call this.

    Args:
        stage: the stage alone.
        inputs: its positional inputs for one microbatch.
        target: as in a step.
        is_first: the inputs are the model's and the caller's; otherwise those of a floating dtype
            want a gradient, and belong to the stage.
        split: whether the schedule splits its backward into I and W.
        rounds: times that it is run again, for its time; the shortest counts.

    Returns:
        Times of 1, or with `rounds` those measured, an unsplit backward's as that of I;
        `activation_bytes`, and with `split` the `weight_gradient_bytes` among them.
    """
    parameters = list(stage.parameters()) if isinstance(stage, nn.Module) else []
    before = [
        p.grad.clone() if p.grad is not None and InPlaceAccumulation.reuses_grad(p) else p.grad
        for p in parameters
    ]
    times, costs = [], StageCosts()

    def give() -> tuple[Any, ...]:
        return tuple(inputs) if is_first else _own(inputs)

    try:
        with torch.random.fork_rng(), torch.enable_grad():
            for turn in range(1 + rounds):
                for parameter in parameters:
                    parameter.grad = None  # autograd would add to it in place
                state = MicrobatchState(store=WeightGradStore() if split else None)
                if turn:
                    times.append(_timed(stage, give(), target, state))
                else:
                    costs = _counted(stage, give, target, state)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    if not times:
        return costs
    forward_s, input_s, weight_s = (min(of_kind) for of_kind in zip(*times, strict=True))
    return replace(costs, forward_s=forward_s, input_gradient_s=input_s, weight_gradient_s=weight_s)


def _counted(
    stage: Stage,
    give: Callable[[], tuple[Any, ...]],
    target: object | None,
    state: MicrobatchState,
) -> StageCosts:
    """The bytes that a microbatch keeps, of inputs that nobody else does."""
    track = MemoryTrack()
    with track.forward((0, 0)):
        _forward(stage, give(), target, state)
    track.after(Action(0, Kind.FORWARD, 0))
    with nullcontext() if state.store is None else state.store.deferring():
        state.run_backward()
    if state.store is None:
        track.after(Action(0, Kind.BACKWARD, 0))
    else:
        track.after(Action(0, Kind.INPUT_GRADIENT, 0))
        state.store.run()
        track.after(Action(0, Kind.WEIGHT_GRADIENT, 0))
    track.finish()
    kept, left = (num_bytes for _, num_bytes in track.timeline[:2])
    return StageCosts(
        activation_bytes=kept, weight_gradient_bytes=None if state.store is None else left
    )


def _timed(
    stage: Stage, inputs: tuple[Any, ...], target: object | None, state: MicrobatchState
) -> tuple[float, float, float]:
    """Seconds of forward, backward or I, and W."""
    devices = {x.device for x in flatten(inputs)[1] if x.device.type == "cuda"}
    ends = [_now(devices)]
    _forward(stage, inputs, target, state)
    ends.append(_now(devices))
    with nullcontext() if state.store is None else state.store.deferring():
        state.run_backward()
    ends.append(_now(devices))
    if state.store is not None:
        state.store.run()
    ends.append(_now(devices))
    forward_s, input_s, weight_s = (b - a for a, b in pairwise(ends))
    return forward_s, input_s, weight_s


def _now(devices: Iterable[torch.device]) -> float:
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _own(inputs: Sequence[Any]) -> tuple[Any, ...]:
    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.is_floating_point())

    return tuple(map_tensors(fresh, tuple(inputs)))


def _forward(
    stage: Stage, inputs: tuple[Any, ...], target: object | None, state: MicrobatchState
) -> None:
    with nullcontext() if state.store is None else split_backward(state.store):
        output = stage(*inputs, target=target)
    _, wanting = activations(output.tensors)
    state.roots = [gate_output(tensor) for tensor in wanting]
    state.loss = output.loss
    state.put_output_gradients([torch.ones_like(tensor) for tensor in wanting])
