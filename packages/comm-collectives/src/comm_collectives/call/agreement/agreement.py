"""Do all ranks make the same call? What their signatures say, as pure functions of them.

Every rank sees every head, so all find the same: go on, ask who can join a backward in which some
are, or raise the same error, whose texts are exchanged only then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from comm_collectives.call.signature import Argument, CallSignature, SignatureWords, Status
from comm_collectives.errors import (
    CommTypeError,
    CommValueError,
    MismatchError,
    RefusedError,
    RefusedTypeError,
)

_EARLIER = "an earlier call"
FLAGS = (1 << 32) - 1  # of a status, those that every rank is told


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementPolicy:
    """When ranks compare their calls; the same on every rank of a group.

    Calls whose data travels by way of the host are always compared, whatever `every` says, since
    what is compared travels with the data. Where a device's backend moves the data (NCCL), calls
    that exchange counts are, and the others each `every`-th time.

    Attributes:
        every: 0 compares only where counts are exchanged; 1 always.
        call_sites: whether two lines of a program are two calls.
    """

    every: int = 64
    call_sites: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.every, int):
            raise CommTypeError(
                f"every={self.every!r} is a {type(self.every).__name__}; give an int"
            )
        if self.every < 0:
            raise CommValueError(f"every={self.every} must be >= 0 (0: with counts; 1: always)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the heads say. `differing` has the positions of the words that differ.

    `awaited` are the calls in whose backward some ranks are and others are not, ascending: it goes
    on if all others can join one of these, and is an error otherwise.
    """

    flags: int = 0
    refused: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the call can go on."""
        return not self.refused and not self.differing

    @property
    def differs_earlier(self) -> bool:
        """Whether these calls are the same, and some of those before them were not."""
        return self.differing == (_EARLIER,)


def compare(words: Sequence[SignatureWords], own: CallSignature) -> Comparison:
    """Compare the heads of all ranks; the same result on each."""
    flags = 0
    for head in words:
        flags |= head.status & FLAGS
    first = words[0]
    refused = tuple(rank for rank, head in enumerate(words) if head.status & Status.REFUSED)
    if all(head[1:5] == first[1:5] and head.arguments == first.arguments for head in words):
        return Comparison(flags=flags, refused=refused)
    backward = [head.arguments[0] for head in words if head.status & Status.BACKWARD]
    is_common = len(backward) == len(words) and len(set(backward)) == 1
    return Comparison(
        flags=flags,
        refused=refused,
        awaited=() if is_common else tuple(sorted(set(backward))),
        # The arguments of a refused call are not worth comparing.
        differing=() if refused else _differing(words, own),
    )


def _differing(words: Sequence[SignatureWords], own: CallSignature) -> tuple[str, ...]:
    def differ(position: int) -> bool:
        return len({head[position] for head in words}) > 1

    if differ(2):
        return ("operation",)
    names = [name for position, name in ((1, "call number"), (3, "call site")) if differ(position)]
    for i in range(len(words[0].arguments)):
        if len({head.arguments[i] for head in words}) > 1:
            known: Argument | None = own.arguments[i] if i < len(own.arguments) else None
            names.append(known.name if known is not None else f"argument {i}")
    return tuple(names) or (_EARLIER,)


def mismatch_error(
    head: str, differing: Sequence[str], texts: Sequence[str], ranks: Sequence[int]
) -> MismatchError:
    """Return the error for ranks that make different calls, with what each said of its own."""
    remedy = ""
    if tuple(differing) == ("call site",):
        remedy = (
            '; if these lines are one call, put both into comm_collectives.call_site("its name")'
        )
    what = " and ".join([", ".join(differing[:-1]), differing[-1]] if differing[1:] else differing)
    verb = "differs" if len(differing) == 1 else "differ"
    return MismatchError(f"{head}: {what} {verb} between ranks: {_grouped(texts, ranks)}{remedy}")


def refused_error(
    head: str, statuses: Sequence[int], texts: Sequence[str], ranks: Sequence[int]
) -> RefusedError:
    """Return the error that every rank raises when the arguments of some are wrong."""
    bad = [r for r, status in enumerate(statuses) if status & Status.REFUSED]
    kind = RefusedTypeError if statuses[bad[0]] & Status.REFUSED_TYPE else RefusedError
    reasons = _grouped([texts[r] for r in bad], [ranks[r] for r in bad])
    return kind(f"{head} refused: {reasons}")


def _grouped(texts: Sequence[str], ranks: Sequence[int]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"{'rank' if len(same) == 1 else 'ranks'} {', '.join(map(str, same))}: {text}"
        for text, same in ranks_of.items()
    )
