"""What a stage's activations take, measured where autograd keeps and frees them.

`saved_tensors_hooks` tell what a forward keeps; what they hand to autograd dies with the node that
keeps it, which is the moment of release. Storages count once for a stage and microbatch, whole,
however many views of them are kept. What does not belong to the graph is left out, since it is
still there when the step is over: parameters, buffers, targets, the caller's inputs. After I, what
the weight gradient store keeps of the activations counts until W.

    track = MemoryTrack()
    executor.step(inputs, targets, track=track)
    assert track.peak_bytes == simulate(schedule, costs).peak_bytes[rank]

A storage that two stages on one rank keep (the output of one, the input of the other) counts for
both, as it does when each is measured alone.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moe_pipeline.executor.execution_plan import MicrobatchKey
from moe_pipeline.schedules.table import Action, Kind


@final
class _KeptTensor:
    """What autograd holds instead of a tensor; its end is the tensor's release."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@final
class _Storage:
    """One storage that a stage keeps for a microbatch."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self.number = self._storage.cdata  # not given again while the weak reference lives
        self._keepers: list[weakref.ref[_KeptTensor]] = []

    @property
    def exists(self) -> bool:
        """Whether anything at all keeps it."""
        return not self._storage.expired()

    @property
    def is_saved(self) -> bool:
        """Whether the graph keeps it."""
        return any(keeper() is not None for keeper in self._keepers)

    def keep(self, kept: _KeptTensor) -> None:
        """Note another place of the graph that keeps it."""
        self._keepers.append(weakref.ref(kept))


@final
class MemoryTrack:
    """Records one step of one rank; give it to `PipelineExecutor.step`.

    Attributes:
        timeline: for each action of the step the activation bytes held after it.
    """

    def __init__(self) -> None:
        self.timeline: list[tuple[Action, int]] = []
        self._stored: dict[MicrobatchKey, dict[int, _Storage]] = {}
        self._split: set[MicrobatchKey] = set()  # between I and W
        self._seen: list[tuple[Action, list[_Storage]]] = []

    @property
    def peak_bytes(self) -> int:
        """The most bytes held after any action."""
        return max((held for _, held in self.timeline), default=0)

    @contextmanager
    def forward(self, key: MicrobatchKey) -> Iterator[None]:
        """Around a stage's forward: notes what the graph keeps."""
        stored = self._stored.setdefault(key, {})

        def pack(tensor: Tensor) -> _KeptTensor:
            kept, storage = _KeptTensor(tensor), _Storage(tensor)
            stored.setdefault(storage.number, storage).keep(kept)
            return kept

        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            yield

    def after(self, action: Action) -> None:
        """Note what is held now."""
        key = (action.stage, action.microbatch)
        if action.kind is Kind.INPUT_GRADIENT:
            self._split.add(key)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            self._split.discard(key)
        self._seen.append((action, self._held()))

    def finish(self) -> None:
        """The step is over: leave out what is still there, and add up."""
        for action, held in self._seen:
            gone = [storage.num_bytes for storage in held if not storage.exists]
            self.timeline.append((action, sum(gone)))
        self._stored, self._seen = {}, []

    def _held(self) -> list[_Storage]:
        return [
            storage
            for key, stored in self._stored.items()
            for storage in stored.values()
            if storage.is_saved or (key in self._split and storage.exists)
        ]
