"""The tensors of one part of a checkpoint by the caller's keys, however they are stored.

Most are stored under their own key. Some options of `save` keep boxes sharded
(`KEY@0:4,8:16@4,16`), or moments as codes with scales beside them (`KEY/scale@0:4,8:16`); this
puts them together again.

    index = PartIndex(checkpoint, "optimizer")
    index.resolve(["w/moment1"])
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from unified_ckpt.geometry import Shape
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.plans.checkpoint import Checkpoint
from unified_ckpt.state.compression import parse_scale_key

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
    """What a part holds; headers are read only of files that hold what is asked for."""

    def __init__(self, checkpoint: Checkpoint, part: str) -> None:
        self._checkpoint = checkpoint
        self._part = part
        stored = checkpoint.keys(part)
        self._whole = set(stored)
        self._split: dict[str, list[_StoredBox]] = defaultdict(list)
        self._scales: dict[str, list[StoredScale]] = defaultdict(list)
        for key in stored:
            if "@" in key:
                self._add_marked(key)

    def _add_marked(self, key: str) -> None:
        scale = parse_scale_key(key)
        if scale is not None:
            self._scales[scale[0]].append(StoredScale(key, scale[1], scale[2]))
            return
        match = _SPLIT_KEY.match(key)
        if match is not None and match[1] not in self._whole:
            offset = tuple(int(range_.partition(":")[0]) for range_ in match[2].split(","))
            shape = tuple(map(int, match[3].split(",")))
            self._split[match[1]].append(_StoredBox(key, offset, shape))

    def tensor_keys(self) -> set[str]:
        """Return the keys of all tensors, scales excluded."""
        scales = {scale.key for stored in self._scales.values() for scale in stored}
        boxes = {box.key for stored in self._split.values() for box in stored}
        return (self._whole - scales - boxes) | set(self._split)

    def __contains__(self, key: str) -> bool:
        return key in self._whole or key in self._split

    def scales(self, key: str) -> list[StoredScale]:
        """Return the scales of a tensor, none if it is not compressed."""
        return self._scales.get(key, [])

    def resolve(self, keys: Iterable[str]) -> dict[str, StoredTensor | SplitTensor]:
        """Return where the tensors of these keys are stored, without those that are not."""
        wanted = list(keys)
        names = [key for key in wanted if key in self._whole]
        names += [box.key for key in wanted for box in self._split.get(key, ())]
        stored = self._checkpoint.tensors(self._part, dict.fromkeys(names))
        found: dict[str, StoredTensor | SplitTensor] = {}
        for key in wanted:
            if key in self._whole:
                found[key] = stored[key]
            elif key in self._split:
                boxes = tuple((box.offset, stored[box.key]) for box in self._split[key])
                found[key] = SplitTensor(
                    dtype=boxes[0][1].dtype, shape=self._split[key][0].global_shape, boxes=boxes
                )
        return found
