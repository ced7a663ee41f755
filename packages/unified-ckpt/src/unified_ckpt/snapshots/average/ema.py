"""An exponential moving average of the weights, kept by the saver process on its copy.

The trainer does nothing for it: every snapshot that is staged can be taken in. The average is fp32
and element-wise, in three operations that each round once,

    ema = ema + (1 - decay) * (weight - ema)

so its bits depend neither on the layout nor on how elements are grouped. All ranks take a snapshot
in or none does: where a saver process is killed after they met for it, the next one ends the update
from an undo copy of the piece that was being changed, though the save itself has failed. The first
snapshot becomes the average as it is. Dtypes that are not floating keep their newest values.

    config = EmaConfig(decay=0.999)
    average = EmaMemory.allocate(config, layout)
    average.update(layout, buffer, number=1, loss=None)
"""

import ctypes
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unified_ckpt.errors import CheckpointValueError, LoadError, SaveArgumentError
from unified_ckpt.geometry import BoxMeta, Shard
from unified_ckpt.geometry.tensors import bits_of, byte_view
from unified_ckpt.snapshots import SharedMemory, StagingLayout

EMA_PART = "ema"
EMA_FILE = "ema_state.json"
_AVERAGED = frozenset(
    ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"]
)
_UNIT_NUMEL = 256 * 1024  # elements that are changed, and can be undone, at a time
_CONTROL_BYTES = 64
_LOW = 2**32 - 1


class _Control(ctypes.Structure):
    """The head of the shared memory; both fields are written in one store, so none is ever half.

    `taken` is the last snapshot that was looked at << 32 | the number taken in. `progress` is the
    snapshot of the update under way << 32 | twice the units done, and 1 more while the next one is
    being changed, of which there is an undo copy then.
    """

    _fields_ = (("taken", ctypes.c_int64), ("progress", ctypes.c_int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """How weights are averaged.

    Attributes:
        decay: weight of the old average in an update, in [0, 1).
        source: the part that is averaged; `master_weights` where the weights have such copies.
        warmup: use min(decay, (1 + n) / (10 + n)) after n updates (TensorFlow's
            `ExponentialMovingAverage(num_updates=)`), so that the first weights fade soon.
        loss_threshold: snapshots whose loss is above it are not taken in. One whose loss is not
            finite never is, so `loss=math.nan` leaves a snapshot out.
    """

    decay: float = 0.9999
    source: str = "model"
    warmup: bool = False
    loss_threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise CheckpointValueError(f"decay={self.decay} must be at least 0 and less than 1")
        if self.loss_threshold is not None and math.isnan(self.loss_threshold):
            raise CheckpointValueError(
                "loss_threshold=nan takes nothing in; pass None to take in all"
            )
        if self.source == EMA_PART:
            raise CheckpointValueError(f"source={self.source!r} is the average; name another part")

    def decay_at(self, num_updates: int) -> float:
        """Return the decay of the update after `num_updates`; the first one takes all: 0."""
        if num_updates == 0:
            return 0.0
        warm = (1.0 + num_updates) / (10.0 + num_updates)
        return min(self.decay, warm) if self.warmup else self.decay

    def takes(self, loss: float | None) -> bool:
        """Whether a snapshot of that loss is taken in; one of unknown loss is."""
        if loss is None:
            return True
        limit = math.inf if self.loss_threshold is None else self.loss_threshold
        return math.isfinite(loss) and loss <= limit

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON types."""
        return {name: getattr(self, name) for name in self.__slots__}


class EmaMemory:
    """The average in shared memory, with what a new saver process needs to continue it.

    Args:
        config: how to average.
        layout: a staging layout that holds the source part.
        memory: what `allocate` made, here or in the other process.
    """

    def __init__(self, config: EmaConfig, layout: StagingLayout, memory: SharedMemory) -> None:
        self.config = config
        self.memory = memory
        self.layout = _average_layout(config, layout)
        self._control = _Control.from_buffer(byte_view(memory.tensor[:_CONTROL_BYTES]))
        undo_end = _CONTROL_BYTES + 4 * _UNIT_NUMEL
        self._undo = memory.tensor[_CONTROL_BYTES:undo_end].view(torch.float32)
        data = memory.tensor[undo_end:]
        self._views = self.layout.views(data)
        self._scratch = torch.empty(_UNIT_NUMEL)

    @classmethod
    def allocate(cls, config: EmaConfig, layout: StagingLayout) -> "EmaMemory":
        """Make zeroed memory for the average of the layout's source part."""
        if config.source not in layout.part_names:
            raise SaveArgumentError(
                f"the moving average is of part {config.source!r}, but the snapshot has only "
                f"{list(layout.part_names)}; pass that part, or change EmaConfig.source"
            )
        num_bytes = _CONTROL_BYTES + 4 * _UNIT_NUMEL + _average_layout(config, layout).num_bytes
        return cls(config, layout, SharedMemory.allocate(num_bytes, purpose="moving average"))

    @property
    def num_updates(self) -> int:
        """Snapshots that were taken in."""
        return int(self._control.taken & _LOW)

    def fits(self, layout: StagingLayout) -> bool:
        """Whether the layout's source part is the one that is averaged here."""
        return _average_layout(self.config, layout).boxes() == self.layout.boxes()

    def shards(self) -> list[Shard]:
        """Return the average as shards, to be saved or loaded; nothing is copied."""
        return [
            entry.shard(view) for entry, view in zip(self.layout.entries, self._views, strict=True)
        ]

    def state(self) -> bytes:
        """Return what stands beside the average in a checkpoint."""
        return json.dumps({"num_updates": self.num_updates, **self.config.to_json()}).encode()

    def moved(self, layout: StagingLayout, average: Sequence[Shard]) -> "EmaMemory":
        """Return memory for snapshots of another layout that goes on with this average.

        Args:
            layout: holds the source part in other boxes.
            average: what `shards` has, in these boxes and of any float dtype; it is copied.

        Raises:
            SaveArgumentError: the boxes are not those of the layout.
        """
        new = EmaMemory.allocate(self.config, layout)
        given = {(shard.key, shard.box): shard.tensor for shard in average}
        room = {(shard.key, shard.box): shard.tensor for shard in new.shards()}
        if given.keys() != room.keys():
            new.memory.close()
            odd = sorted({key for key, _ in given.keys() ^ room.keys()})
            raise SaveArgumentError(
                f"the moving average of {odd[:5]} is not in the boxes that part "
                f"{self.config.source!r} has now; give it as the state dict holds that part"
            )
        for name, tensor in room.items():
            tensor.copy_(given[name])
        new._commit(self.num_updates, 0)
        return new

    def restore(self, state: bytes) -> None:
        """Take over the number of updates after the shards have been loaded."""
        try:
            num_updates = int(json.loads(state)["num_updates"])
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{EMA_FILE} is malformed: {error!r}") from error
        self._commit(num_updates, 0)

    def update(
        self, layout: StagingLayout, memory: torch.Tensor, *, number: int, loss: float | None
    ) -> None:
        """Take a snapshot in, or continue to where a killed process had done so.

        Args:
            layout: of the snapshot.
            memory: the staging buffer (uint8).
            number: of the snapshot, rising; one that was taken in before is not taken again.
            loss: of the snapshot's step; see `EmaConfig.loss_threshold`.
        """
        if number <= self._control.taken >> 32:
            return
        if self.config.takes(loss):
            sources = [e.view(memory) for e in layout.entries if e.part == self.config.source]
            self._average(sources, number)
            self._commit(self.num_updates + 1, number)
        else:
            self._commit(self.num_updates, number)

    def _commit(self, num_updates: int, number: int) -> None:
        """Replace both numbers in one store."""
        self._control.taken = number << 32 | num_updates

    def _average(self, sources: list[torch.Tensor], number: int) -> None:
        weight = 1.0 - self.config.decay_at(self.num_updates)
        base, control = number << 32, self._control
        if control.progress >> 32 != number:
            control.progress = base
        done, was_changing = divmod(control.progress - base, 2)
        for unit, (source, target) in enumerate(self._units(sources)):
            if unit < done:
                continue
            if target.dtype == torch.float32:
                undo = self._undo[: target.numel()]
                if unit == done and was_changing:
                    target.copy_(undo)  # of a process that was killed while it changed this unit
                else:
                    undo.copy_(target)
                    control.progress = base + 2 * unit + 1
                self._mix(source, target, weight)
            else:
                target.copy_(source)
            control.progress = base + 2 * unit + 2

    def _mix(self, source: torch.Tensor, target: torch.Tensor, weight: float) -> None:
        if weight == 1.0:
            target.copy_(source)
            return
        change = self._scratch[: target.numel()]
        torch.sub(source.to(torch.float32), target, out=change)
        target.add_(change.mul_(weight))

    def _units(self, sources: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for entry, source, target in zip(self.layout.entries, sources, self._views, strict=True):
            if entry.meta.dtype != "F32":
                yield bits_of(source), bits_of(target)
                continue
            flat_source, flat_target = source.view(-1), target.view(-1)
            for at in range(0, flat_target.numel(), _UNIT_NUMEL):
                yield flat_source[at : at + _UNIT_NUMEL], flat_target[at : at + _UNIT_NUMEL]


def average_for(config: EmaConfig, layout: StagingLayout, current: EmaMemory | None) -> EmaMemory:
    """Return the average for snapshots of a layout: the current one, or a new one."""
    if EMA_PART in layout.part_names:
        raise SaveArgumentError(
            f"part {EMA_PART!r} is where the moving average is saved; give yours another name"
        )
    if current is None:
        return EmaMemory.allocate(config, layout)
    if not current.fits(layout):
        raise SaveArgumentError(
            f"the shards of part {config.source!r} are not those of the moving average; make a "
            "new AsyncSaver for another layout and call load_ema"
        )
    return current


def _average_layout(config: EmaConfig, layout: StagingLayout) -> StagingLayout:
    """The source part's shards with the dtypes and places that they have in the average."""
    boxes = [
        (EMA_PART, _averaged(entry.meta), entry.shape)
        for entry in layout.entries
        if entry.part == config.source
    ]
    return StagingLayout.of_boxes((EMA_PART,), boxes)


def _averaged(meta: BoxMeta) -> BoxMeta:
    return replace(meta, dtype="F32") if meta.dtype in _AVERAGED else meta
