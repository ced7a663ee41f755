"""Which tensors of a directory the names of a family's rules and lists stand for.

    matcher = Matcher([rule.source for rule in rules], companions=("_scale_inv",))
    matcher.find("model.layers.3.mlp.experts.10.w1.weight")     # Member(side=0, expert=10, ...)

Numbers are read by value (`10` is not `1` and `0`, `03` is no expert). Finding is one look-up and
one match for each tensor: names that differ in numbers alone are compared with the rules once.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from weight_convert.specs.rules import EXPERT, Side

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # whole fields: the 1 of w1 is no number
_PLACE_PATTERNS = {
    "{model}": r"(?:[a-z_]+\.)*",
    "{layer}": r"(?P<layer>(?:.+\.)?layers\.\d+)",
    "{n}": r"(?P<n>0|[1-9]\d{0,17})",
    "{expert}": r"(?P<expert>0|[1-9]\d{0,17})",
}


Places = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A tensor's place in a side: which of its names, and what the name's places stand for.

    Attributes:
        side: number of the side.
        part, expert: which tensor of the side; 0 where there is one.
        places: what `{layer}` or `{n}` stands for.
        suffix: of a companion (`_scale_inv`); empty for the tensor itself.
    """

    side: int
    part: int
    expert: int
    places: Places
    suffix: str


@dataclass(slots=True)
class Matcher:
    """Finds members of sides.

    Attributes:
        sides: in the order in which they are tried.
        companions: suffixes with which each name may stand too; a side that has the whole name
            comes first.
        allows: says of a side and what its places stand for whether it may be taken.
    """

    sides: Sequence[Side]
    companions: tuple[str, ...] = ()
    allows: Callable[[int, Places], bool] | None = None
    _candidates: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def find(self, key: str) -> Member | None:
        """The first member that has this name; None if no side has it."""
        found = self._find(key, "")
        suffix = next((end for end in self.companions if key.endswith(end)), "")
        if found is None and suffix:
            found = self._find(key.removesuffix(suffix), suffix)
        return found

    @staticmethod
    def skeletons(keys: Iterable[str]) -> Counter[str]:
        """How many names are the same but for their numbers, each kind with 0 in their places."""
        return Counter(_NUMBER.sub("0", key) for key in keys)

    def _find(self, name: str, suffix: str) -> Member | None:
        skeleton = _NUMBER.sub("0", name)
        if skeleton not in self._candidates:
            self._candidates[skeleton] = tuple(
                (number, part)
                for number, side in enumerate(self.sides)
                for part, template in enumerate(side.names)
                if pattern_of(template).fullmatch(skeleton)
            )
        for number, part in self._candidates[skeleton]:
            match = pattern_of(self.sides[number].names[part]).fullmatch(name)
            if match is not None:
                found = match.groupdict()
                expert = int(found.pop(EXPERT, 0))
                places = tuple(found.items())
                if self.allows is not None and not self.allows(number, places):
                    continue
                return Member(side=number, part=part, expert=expert, places=places, suffix=suffix)
        return None

    def is_of_one_expert(self, key: str) -> bool:
        """Whether the name begins as that of one expert's tensor does."""
        stems = {
            name.partition("{expert}")[0] + "{expert}."
            for side in self.sides
            for name in side.names
            if "{expert}" in name
        }
        return any(pattern_of(stem).match(key) for stem in stems)


@cache
def pattern_of(template: str) -> re.Pattern[str]:
    """The expression of a whole name; `{model}` is any path before the layers, or none."""
    text = re.escape(template)
    for place, pattern in _PLACE_PATTERNS.items():
        text = text.replace(re.escape(place), pattern)
    return re.compile(text)


def fill(template: str, places: Sequence[tuple[str, str]], expert: int = 0) -> str:
    """The name of one tensor."""
    for place, value in places:
        template = template.replace(f"{{{place}}}", value)
    return template.replace("{expert}", str(expert))
