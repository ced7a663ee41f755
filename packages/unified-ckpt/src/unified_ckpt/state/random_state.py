"""The state of all random number generators of a rank, as JSON, and back.

A run that resumes draws the same dropout masks and the same batches only if every generator goes on
where it stood: Python's, numpy's if it is used, torch's on the CPU and on each CUDA device, and the
named generators of a tracker (tensor-parallel ranks that share some masks and differ in others).
Each rank has its own, so they are a file per rank; nothing is pickled.

    save(state, checkpoint_id=target, rank_files=random_state_files(rank))
    restore_random_state(target, rank)
"""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from unified_ckpt.errors import CheckpointValueError, CorruptCheckpointError, LoadError, check_type
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry.tensors import byte_view
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint


class NumpyGenerator(Protocol):
    """`numpy.random` itself, or a `numpy.random.RandomState`."""

    def get_state(self, legacy: bool = True) -> Any:
        """Return the state; a dict with `legacy=False`."""

    def set_state(self, state: Any) -> None:
        """Take a state."""


def random_state_file(rank: int) -> str:
    """Return the name of a rank's file."""
    check_type("rank", rank, int)
    return f"random_state-{rank:05d}.json"


def random_state_files(
    rank: int,
    *,
    numpy_random: NumpyGenerator | None = None,
    tracker: Mapping[str, torch.Generator] | None = None,
) -> dict[str, bytes]:
    """Return what `save` takes as `rank_files`: the state of this rank's generators, by file name.

    Args:
        rank: of this process, in the numbering that `restore_random_state` will use.
        numpy_random: `numpy.random`, or a `RandomState`, if the run draws from it.
        tracker: named generators besides torch's default ones.
    """
    tensors = {"torch.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            tensors[f"torch.cuda.{device}"] = torch.cuda.get_rng_state(device)
    for name, generator in (tracker or {}).items():
        tensors[f"tracker.{name}"] = generator.get_state()
    states: dict[str, Any] = {name: _to_text(state) for name, state in tensors.items()}
    states["python"] = random.getstate()
    if "torch.cuda.0" in states:  # a resumed rank may have another device of its machine
        states["cuda_device"] = torch.cuda.current_device()
    if numpy_random is not None:
        states["numpy"] = _numpy_json(numpy_random.get_state(legacy=False))
    return {random_state_file(rank): json.dumps(states).encode()}


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(byte_view(state.contiguous())).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _numpy_json(state: Any) -> Any:
    """Turn arrays and numpy integers of a state into lists and ints."""
    if isinstance(state, Mapping):
        return {name: _numpy_json(value) for name, value in state.items()}
    tolist = getattr(state, "tolist", None)
    return state if tolist is None else tolist()


def restore_random_state(
    checkpoint_id: Path | str | Location,
    rank: int,
    *,
    numpy_random: NumpyGenerator | None = None,
    tracker: Mapping[str, torch.Generator] | None = None,
) -> bool:
    """Set this rank's generators as they were saved; False if the checkpoint has none for it.

    With more ranks than were saved, the additional ones have no state to go on from: seed them.

    Raises:
        LoadError: a generator that is given was not saved.
        CorruptCheckpointError: the file is damaged.
    """
    name = random_state_file(rank)
    states = read_checkpoint(checkpoint_id, lambda checkpoint: _read(checkpoint, name))
    if states is None:
        return False
    wanted = {f"tracker.{key}": generator for key, generator in (tracker or {}).items()}
    asked = [*wanted, *(["numpy"] if numpy_random is not None else [])]
    if any(key not in states for key in asked):
        raise LoadError(f"{name} of {checkpoint_id} holds {list(states)}, not all of {asked}")
    for key, generator in wanted.items():
        generator.set_state(states[key])
    torch.set_rng_state(states["torch.cpu"])
    if torch.cuda.is_available():
        own = torch.cuda.current_device()
        for device in range(torch.cuda.device_count()):
            saved = states.get("cuda_device", own) if device == own else device
            if f"torch.cuda.{saved}" in states:
                torch.cuda.set_rng_state(states[f"torch.cuda.{saved}"], device)
    random.setstate(states["python"])
    if numpy_random is not None:
        numpy_random.set_state(states["numpy"])
    return True


def _read(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    if not checkpoint.holds(name):
        return None
    try:
        states = json.loads(checkpoint.read_file(name))
        if not isinstance(states, dict) or not {"torch.cpu", "python"} <= states.keys():
            raise CheckpointValueError("it lacks torch.cpu or python")
        for key, state in states.items():  # all of them, before any generator is set
            if key.startswith(("torch.", "tracker.")):
                states[key] = _to_tensor(state)
        version, words, gauss = states["python"]
        states["python"] = version, tuple(words), gauss
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{checkpoint.folder / name}: no random state: {error}"
        ) from error
    return states
