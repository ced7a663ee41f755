"""What the keys of `parallel` say about later layouts, and about uneven experts; pure.

change = LayoutChange.parsed("100: ep=2 experts=3,5")
change.step, change.sizes, change.experts          # 100, {"pp": 1, "dp": 1, "ep": 2}, "3,5"
parsed_parts(["3,5", "7: 4,4"])                    # {None: (3, 5), 7: (4, 4)}
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_train.config.layout_fit import check_experts_shared_out, check_sharing
from moe_train.errors import TrainValueError

Key = Literal["parallel.relayout", "parallel.expert_parts"]

BY_LOAD = "load"
"""Parts that follow from the tokens that each expert has got."""

_PARTS = r"\d+(?:,\d+)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """One entry of `parallel.relayout`.

    `sizes`: of pp, dp and ep, whose product are the ranks. `cp`, `tp`: of the ranks of a stage that
    share each sample. `etp`: of the dp ranks those that share each expert. `experts`: parts of
    every layer, "load", or "" for equal ones.
    """

    step: int
    sizes: dict[str, int]
    cp: int
    tp: int
    etp: int
    experts: str

    @classmethod
    def parsed(cls, text: str) -> "LayoutChange":
        """Read "100: pp=2 ep=4 experts=3,5,4,4".

        Raises:
            ValueError: it is no change of layout.
        """
        item = (
            rf"[\s,]*(?:(?:pp|dp|ep|cp|tp|etp)=[1-9]\d*|experts=(?:{BY_LOAD}|{_PARTS}))(?![^\s,])"
        )
        found = re.fullmatch(rf"\s*(\d+)\s*:((?:{item})+)\s*", text)
        pairs = re.findall(rf"([a-z]+)=({BY_LOAD}|{_PARTS})", found[2]) if found else []
        given = dict(pairs)
        if not found or len(given) < len(pairs):
            raise TrainValueError(
                f"parallel.relayout: {text!r} is no change of layout; write the finished steps and "
                'the sizes of axes, each once, as in "100: pp=2 ep=4", and how many experts the '
                'ranks along ep hold, if not as many, as in "100: ep=2 experts=3,5" or experts=load'
            )
        experts = given.pop("experts", "")
        cp, tp, etp = (int(given.pop(name, 1)) for name in ("cp", "tp", "etp"))
        sizes = {"pp": 1, "dp": 1, "ep": 1} | {axis: int(size) for axis, size in given.items()}
        ranks = sizes["dp"] * sizes["ep"]
        place = f"parallel.relayout: {text!r}: "
        check_sharing(place, cp=cp, tp=tp, num_token_ranks=ranks)
        check_experts_shared_out(etp, dp=sizes["dp"], place=place)
        change = cls(step=int(found[1]), sizes=sizes, cp=cp, tp=tp, etp=etp, experts=experts)
        if experts and experts != BY_LOAD:
            check_parts("parallel.relayout", text, change.parts, sizes["ep"])
        return change

    @property
    def parts(self) -> tuple[int, ...]:
        """The explicit parts; none where there are no such."""
        return () if self.experts in ("", BY_LOAD) else _counted(self.experts)


def parsed_parts(texts: Sequence[str]) -> dict[int | None, tuple[int, ...]]:
    """The entries of `parallel.expert_parts`, by layer; None: of all that are not named.

    Raises:
        ValueError: one is none, or a layer stands twice.
    """
    parts: dict[int | None, tuple[int, ...]] = {}
    for text in texts:
        found = re.fullmatch(rf"\s*(?:(\d+)\s*:)?\s*({_PARTS})\s*", text)
        if found is None:
            raise TrainValueError(
                f"parallel.expert_parts: {text!r} are no parts; write the experts of each rank "
                'along ep, as in "3,5", for one layer with its number before, as in "7: 3,5"'
            )
        layer = None if found[1] is None else int(found[1])
        if layer in parts:
            which = "every layer" if layer is None else f"layer {layer}"
            raise TrainValueError(
                f"parallel.expert_parts says twice what {which} has; take out {text!r} or the other"
            )
        parts[layer] = _counted(found[2])
    return parts


def check_parts(key: Key, text: str, parts: Sequence[int], ep: int) -> None:
    """Refuse parts that are not as many as the ranks along ep (ValueError)."""
    if len(parts) != ep:
        raise TrainValueError(
            f"{key}: {text!r} has parts for {len(parts)} ranks, but ep={ep}; give one number for "
            "each rank along ep"
        )


def _counted(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
