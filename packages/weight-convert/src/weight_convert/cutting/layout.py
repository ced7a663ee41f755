"""The degrees of a layout, and where each rank stands in it.

    layout = SplitLayout(tp=4, ep=2)
    layout.world_size, layout.places(3)      # 4, {"pp": 0, "tp": 3, "ep": 1, "etp": 0}

Ranks of a stage count up; tp and etp are the fastest axes, then ep, as in Megatron-Core. A stage
has as many ranks as both its dense and its expert axes divide.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weight_convert._checks import Record
from weight_convert.errors import WeightConvertError


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayout(Record):
    """Degrees of parallelism.

    Attributes:
        tp: ranks among which attention, dense layers and the vocabulary are cut.
        ep: ranks among which the experts are dealt.
        etp: ranks among which each expert is cut.
        pp: stages to which the layers are dealt.
        vocab_multiple: the vocabulary is padded with zero rows to a multiple of this times tp; 0
            leaves it as it is, and cuts it unevenly where it must be.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    vocab_multiple: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        for name in ("tp", "ep", "etp", "pp"):
            if getattr(self, name) < 1:
                raise WeightConvertError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.vocab_multiple < 0:
            raise WeightConvertError(f"vocab_multiple={self.vocab_multiple}; expected 0 or more")

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return math.lcm(self.tp, self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.stage_size

    def places(self, rank: int) -> Mapping[str, int]:
        """The place of a rank on each axis."""
        stage, inner = divmod(rank, self.stage_size)
        return {
            "pp": stage,
            "tp": inner % self.tp,
            "ep": inner // self.etp % self.ep,
            "etp": inner % self.etp,
        }


def shares(count: int, ranks: int) -> list[tuple[int, int]]:
    """(begin, length) of each rank's share of `count` things; the first ranks have one more."""
    least, more = divmod(count, ranks)
    return [(rank * least + min(rank, more), least + (rank < more)) for rank in range(ranks)]
