"""What a recorded program will need: its peak, of what that consists, and what is reserved for it.

Invariant: the categories' bytes add up to the peak.

    with ShapesOnly(), TraceRecorder(labels={"torch.optim": "optimizer"}) as recorder:
        train_step()
        recorder.label("parameters", model.parameters())
    forecast(recorder.events, "torch").reserved_bytes
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.errors import AllocValueError
from gpu_alloc.events import TraceEvent
from gpu_alloc.torch.native_rules import NativeRules
from gpu_alloc.trace import replay, summarize

Allocator = Literal["torch", "torch-expandable", "gpu-alloc"]
UNLABELLED = "activations"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of a trace: most bytes live at a time, in which phase, what they are by label (what has none
    is an activation), and the bytes that `allocator` takes from the device for all of it.
    """

    peak_bytes: int
    phase: str
    peak_by_category: Mapping[str, int]
    allocator: Allocator
    reserved_bytes: int


def forecast(
    trace: Sequence[TraceEvent],
    allocator: Allocator = "torch",
    config: AllocatorConfig | None = None,
) -> Forecast:
    """What a program needs whose trace a `TraceRecorder` with labels has made.

    Args:
        allocator: "torch": the rules of torch's caching allocator, "torch-expandable": the same
            with expandable segments, "gpu-alloc": `config`.
            None has a limit: on a device that is nearly full each gives memory back that it keeps
            otherwise.
        config: of "gpu-alloc"; None: `AllocatorConfig.from_env()`.

    Raises:
        AllocValueError: an allocator that is none of these, or `config` for another one.
        TraceError: as `replay`.
    """
    if allocator not in get_args(Allocator):
        raise AllocValueError(
            f"allocator={allocator!r}; give one of {', '.join(map(repr, get_args(Allocator)))}"
        )
    if config is not None and allocator != "gpu-alloc":
        raise AllocValueError(f"config is of allocator='gpu-alloc', not of {allocator!r}")
    found = summarize(trace)
    categories: Counter[str] = Counter()  # one label may be the name of what has none
    for name, size in found.peak_by_line:
        categories[name or UNLABELLED] += size
    return Forecast(
        peak_bytes=found.peak_live_bytes,
        phase=found.phase,
        peak_by_category=dict(categories.most_common()),
        allocator=allocator,
        reserved_bytes=_reserved(trace, allocator, config),
    )


def _reserved(
    trace: Sequence[TraceEvent], allocator: Allocator, config: AllocatorConfig | None
) -> int:
    if allocator != "gpu-alloc":
        rules = NativeRules(expandable=allocator == "torch-expandable")
        return rules.peak_reserved(trace)
    result = replay(trace, AllocatorConfig.from_env() if config is None else config)
    return result.peak_reserved_bytes
