"""A rank's weights, and what it keeps for their updates, as boxes of stored tensors.

mine = RankTensors(rank=0, parameters=tensors, layouts=layouts, layouts_of_updates=layouts)
mine.updates(moments, "/exp_avg").shards         # what to save, or to load into
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from moe_train.checkpoint.parts import read_model, read_part
from moe_train.layout import (
    ParameterLayout,
    StoredTensors,
    has_new_rows,
    load_first_rows,
    stored_tensors,
)

logger = logging.getLogger(__name__)

_SHOWN = 5


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

        Rows of vocabulary that it does not have become the mean of those that it has; embedding and
        head are whole for a moment then. What no rank has a place for is a line of the log.
        """
        grown = {n for n in self.parameters if has_new_rows(self.layouts[n], source)}
        others = {n: t for n, t in self.parameters.items() if n not in grown}
        known = [f"^{re.escape(name)}\\Z" for name in grown]
        unused = read_model(source, self.weights(others), known)
        if unused and self.rank == 0:
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            names = ", ".join(unused[:_SHOWN])
            logger.warning(
                "warning: %s holds tensors that no layer takes: %s%s", source, names, more
            )
        others = {n: t for n, t in masters.items() if n not in grown}
        if others:
            read_part(source, "model", [self.updates(others)], cast=True)
        for name in sorted(grown):
            self._load_grown(self.parameters[name], self.layouts[name], source)
            if name in masters:
                self._load_grown(masters[name], self.layouts_of_updates[name], source)

    def _load_grown(self, tensor: Tensor, layout: ParameterLayout, source: Path) -> None:
        def load(stored: StoredTensors) -> None:
            read_part(source, "model", [stored], cast=True)

        load_first_rows(layout, tensor, source, rank=self.rank, load=load)
