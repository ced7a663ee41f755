"""Where each request of a step goes, known before it comes: what planned mode follows.

A plan holds places relative to the start of one range of memory, in the order of the step's
requests; bytes of it belong to one stream. `plan_step` makes one of a recorded step.

Invariant: a plan that exists can be followed: its places lie inside its range, are aligned, and no
byte is of two streams. Whether a place is free is asked when it is used, so that a plan which does
not fit the program costs time and never correctness.

>>> LifetimePlan(places=((1024, 0, 0), (512, 0, 1024)), alignment_size=512).size_bytes
1536
"""

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, final

from gpu_alloc.errors import AllocValueError, TraceError, check_kind
from gpu_alloc.events import TraceEvent

END_OF_STEP = "end of "  # what begins the name of the mark at which a phase ends
_FORMAT: dict[str, object] = {"format": "gpu-alloc-plan", "version": 1}


class PlanUse(NamedTuple):
    """is_following: there is a plan and memory for it, which is given up when nothing else is left
    for a request. num_planned: requests that went where it said, num_unplanned: elsewhere, since
    the plan was given.
    """

    is_following: bool
    num_planned: int
    num_unplanned: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimePlan:
    """places: (size in bytes, stream, offset in bytes) of each request of a step, in its order.
    step: the mark at which it began in the trace; a replay begins a step at each mark that differs
    from it by numbers only.

    Raises AllocValueError for places that are not aligned or share bytes between streams.
    """

    places: tuple[tuple[int, int, int], ...]
    alignment_size: int
    step: str = ""

    def __post_init__(self) -> None:
        check_kind(self.step, str, "step must be the name of a mark")
        check_kind(self.places, tuple, "places must be a tuple of (size, stream, offset)")
        check_alignment_size(self.alignment_size)
        if not self.places:
            raise AllocValueError("a plan without places plans nothing; make one with plan_step")
        for place in self.places:
            if len(place) != 3 or any(type(number) is not int for number in place):
                raise AllocValueError(
                    f"{place} is not three whole numbers; give size, stream, offset"
                )
            size, _, offset = place
            if size <= 0 or offset < 0 or (size | offset) % self.alignment_size:
                raise AllocValueError(
                    f"size {size} at offset {offset} is not a place aligned to "
                    f"{self.alignment_size}; make the plan with plan_step"
                )
        for (_, (_, end)), (stream, (start, _)) in pairwise(self._by_address()):
            if start < end:
                raise AllocValueError(
                    f"bytes before {end} are of the stream before {stream} and of it; give each "
                    "stream a part of its own, as plan_step does"
                )

    @property
    def size_bytes(self) -> int:
        """How long the range is."""
        return max((offset + size for size, _, offset in self.places), default=0)

    def streams(self) -> list[tuple[int, int]]:
        """(stream, first byte) of the part of each stream, by rising address; parts follow each
        other without a gap.
        """
        found = [(stream, start) for stream, (start, _) in self._by_address()]
        return [(stream, start if number else 0) for number, (stream, start) in enumerate(found)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads."""
        check_kind(path, (str, os.PathLike), "path must be a str or a Path")
        content: dict[str, object] = _FORMAT | {
            "alignment_size": self.alignment_size,
            "places": self.places,
        }
        content["step"] = self.step
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LifetimePlan":
        """Read a file that `save` wrote. Raises TraceError naming the file for anything else."""
        check_kind(path, (str, os.PathLike), "path must be a str or a Path")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if {key: content[key] for key in _FORMAT} != _FORMAT:
                raise TraceError("of another format or version; write one with gpu-alloc plan")
            return cls(
                places=tuple(tuple(place) for place in content["places"]),
                alignment_size=content["alignment_size"],
                step=content["step"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{os.fspath(path)} is no plan: {error!r}") from None

    def _by_address(self) -> list[tuple[int, tuple[int, int]]]:
        ends: dict[int, tuple[int, int]] = {}
        for size, stream, offset in self.places:
            start, end = ends.get(stream, (offset, offset))
            ends[stream] = min(start, offset), max(end, offset + size)
        return sorted(ends.items(), key=lambda item: item[1])


def check_alignment_size(alignment_size: int) -> None:
    """Raise AllocTypeError or AllocValueError for what is no alignment."""
    check_kind(alignment_size, int, "alignment_size must be a whole number")
    if alignment_size < 1:
        raise AllocValueError(f"alignment_size={alignment_size} is below 1; use 512")


def is_step_mark(event: TraceEvent, step: str) -> bool:
    """Whether a step begins here that is the like of `step`: marks that differ by numbers only."""
    return (
        event.action == "mark"
        and bool(step)
        and _without_numbers(event.note) == _without_numbers(step)
    )


def _without_numbers(name: str) -> str:
    return "".join(letter for letter in name if not letter.isdigit())


def check_plan(plan: LifetimePlan | None, alignment_size: int) -> None:
    """Raise AllocTypeError for what is no plan, AllocValueError for one of another alignment."""
    check_kind(plan, (LifetimePlan, type(None)), "plan must be a LifetimePlan or None")
    if plan is not None and plan.alignment_size != alignment_size:
        raise AllocValueError(
            f"the plan is aligned to {plan.alignment_size}, the settings to {alignment_size}; make "
            "the plan with that alignment_size"
        )


def check_in_use(num_blocks: int) -> None:
    """Raise AllocValueError when blocks of a plan are in use that is to end."""
    if num_blocks:
        raise AllocValueError(
            f"{num_blocks} blocks of the plan that is followed are in use; free them, or go on "
            "with it"
        )
