"""A rank's weights, and what it keeps for their updates, as boxes of stored tensors.

mine = RankTensors(rank=0, parameters=tensors, layouts=layouts, layouts_of_updates=layouts)
mine.updates(moments, "/exp_avg").shards         # what to save, or to load into
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from moe_train.checkpoint.parts import read_part
from moe_train.layout import (
    ParameterLayout,
    StoredTensors,
    fill_new_rows,
    first_rows,
    stored_tensors,
)


@dataclass(frozen=True, slots=True)
class _Made:
    """The stored form of tensors at these addresses; its views keep that memory from being freed.

    So tensors of the same names that begin there are the same memory.
    """

    addresses: Mapping[str, int]
    stored: StoredTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensors:
    """Where this rank's tensors lie; views of them are made once, not for every save.

    Args:
        parameters: name -> this rank's parameter or buffer.
        layouts: of the parameters, and of what is shaped as they are.
        layouts_of_updates: of moments and master weights, of which a rank may have fewer rows.
    """

    rank: int
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, ParameterLayout]
    layouts_of_updates: Mapping[str, ParameterLayout]
    _made: dict[str, _Made] = field(default_factory=dict, init=False, repr=False)

    def weights(self, tensors: Mapping[str, Tensor]) -> StoredTensors:
        """The stored form of parameters and buffers."""
        return self._stored("", self.layouts, tensors, "")

    def updates(self, tensors: Mapping[str, Tensor], suffix: str = "") -> StoredTensors:
        """The stored form of moments or master weights, under keys that end with `suffix`."""
        return self._stored(f"updates{suffix}", self.layouts_of_updates, tensors, suffix)

    def _stored(
        self,
        kind: str,
        layouts: Mapping[str, ParameterLayout],
        tensors: Mapping[str, Tensor],
        suffix: str,
    ) -> StoredTensors:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        made = self._made.get(kind)
        if made is not None and made.addresses == addresses:
            return made.stored
        stored = stored_tensors(layouts, tensors, self.rank, suffix)
        if not stored.rearranged:  # copies would be of old values
            self._made[kind] = _Made(addresses, stored)
        return stored

    def load_first(self, source: Path, masters: Mapping[str, Tensor]) -> None:
        """Fill the parameters and master weights from a transformers checkpoint.

        Rows of vocabulary that it does not have become the mean of those that it has; master
        weights are whole for a moment then.
        """
        self._load_rows(self.parameters, source)
        stored = first_rows(self.layouts, self.parameters, source)[0]
        grown = {n for n in masters if stored[n].global_shape != self.layouts[n].global_shape}
        whole = {name: self.parameters[name].float() for name in grown}
        if whole:
            self._load_rows(whole, source)
        others = {name: master for name, master in masters.items() if name not in grown}
        if others:
            read_part(source, "model", [self.updates(others)], cast=True)
        for name in grown:
            first = self.layouts_of_updates[name].first_row(self.rank)
            first -= self.layouts[name].first_row(self.rank)
            masters[name].copy_(whole[name][first : first + len(masters[name])])

    def _load_rows(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Fill whole parameters, or what is shaped as they are."""
        layouts, rows = first_rows(self.layouts, tensors, source)
        read_part(source, "model", [stored_tensors(layouts, rows, self.rank)], cast=True)
        fill_new_rows(tensors, source)
