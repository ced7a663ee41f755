"""The tensors of one part of a checkpoint by the caller's keys, however they are stored.

Most are stored under their own key. Some options of `save` keep boxes sharded
(`KEY@0:4,8:16@4,16`), or moments as codes with scales beside them (`KEY/scale@0:4,8:16`); this
puts them together again.

    index = PartIndex(checkpoint, "optimizer")
    index.resolve(["w/moment1"])
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from unified_ckpt.geometry import Shape
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.plans.checkpoint import Checkpoint
from unified_ckpt.state.compression import moment_of, parse_scale_key

_SPLIT_KEY = re.compile(r"(.+)@(\d+:\d+(?:,\d+:\d+)*)@(\d+(?:,\d+)*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredScale:
    """The scales of one box of a compressed moment, a stored tensor `key`."""

    key: str
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class _StoredBox:
    key: str
    offset: Shape
    global_shape: Shape


class PartIndex:
    """What a part holds; of keys and headers only those are read that are asked for."""

    def __init__(self, checkpoint: Checkpoint, part: str) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self._stored = checkpoint.stored_keys(part)

    def tensor_keys(self) -> set[str]:
        """Return the keys of all tensors, scales excluded."""
        stored = self._stored.all()
        found = set()
        for key in stored:
            if "@" not in key:
                found.add(key)
            elif parse_scale_key(key) is None:
                match = _SPLIT_KEY.match(key)
                found.add(key if match is None or match[1] in stored else match[1])
        return found

    def __contains__(self, key: str) -> bool:
        return self._stored.find(key) is not None or bool(self._boxes(key))

    def scales(self, key: str) -> list[StoredScale]:
        """Return the scales of a tensor, none if it is not compressed; only moments are."""
        if moment_of(key) is None:
            return []
        stored = [(name, parse_scale_key(name)) for name in self._stored.starting(f"{key}/scale@")]
        return [
            StoredScale(name, scale[1], scale[2])
            for name, scale in stored
            if scale is not None and scale[0] == key
        ]

    def resolve(self, keys: Iterable[str]) -> dict[str, StoredTensor | SplitTensor]:
        """Return where the tensors of these keys are stored, without those that are not."""
        wanted = list(keys)
        whole = self._checkpoint.tensors(self._part, wanted)
        found: dict[str, StoredTensor | SplitTensor] = {**whole}
        boxes_of = {key: self._boxes(key) for key in wanted if key not in whole}
        names = [box.key for stored_boxes in boxes_of.values() for box in stored_boxes]
        stored = self._checkpoint.tensors(self._part, names)
        for key, stored_boxes in boxes_of.items():
            if stored_boxes:
                boxes = tuple((box.offset, stored[box.key]) for box in stored_boxes)
                shape = stored_boxes[0].global_shape
                found[key] = SplitTensor(dtype=boxes[0][1].dtype, shape=shape, boxes=boxes)
        return found

    def _boxes(self, key: str) -> list[_StoredBox]:
        """Return the boxes of a tensor that is not stored under its own key."""
        found = []
        for name in self._stored.starting(f"{key}@"):
            match = _SPLIT_KEY.match(name)
            if match is not None and match[1] == key and parse_scale_key(name) is None:
                offset = tuple(int(range_.partition(":")[0]) for range_ in match[2].split(","))
                shape = tuple(map(int, match[3].split(",")))
                found.append(_StoredBox(name, offset, shape))
        return found
