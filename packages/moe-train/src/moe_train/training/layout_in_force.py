"""Which layout a run is in, and which one the step that comes wants.

    force = LayoutInForce()
    force.loads.add(result.load_LE)                        # after each step
    wanted = force.wanted(config.parallel, step, model)    # as parallel.relayout says
    force.enter(wanted, step)

Invariant: what a run does depends on steps, on the job and on what a checkpoint holds of it, so
that one that goes on from a checkpoint does the same as one that was never stopped.
"""

from dataclasses import dataclass, field, replace

from moe_train.checkpoint import TrainerState
from moe_train.config import ParallelConfig
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig
from moe_train.parallel import SIZES
from moe_train.training.experts import ExpertLoads


@dataclass(slots=True)
class LayoutInForce:
    """The change of layout that was made last.

    Attributes:
        loads: rows of the experts since then.
        parts: where the experts lie since then, as `parallel.expert_parts` has it.
        change: after how many steps it was; 0: there was none.
    """

    loads: ExpertLoads = field(default_factory=ExpertLoads)
    parts: tuple[str, ...] = ()
    change: int = 0

    @classmethod
    def of(cls, parallel: ParallelConfig, state: TrainerState | None) -> "LayoutInForce":
        """That of a new run, or of one that goes on from `state`.

        A state is saved before the change of layout that comes after its step.
        """
        if state is None:
            return cls(parts=parallel.expert_parts)
        loads = ExpertLoads([list(row) for row in state.expert_rows])
        return cls(loads, state.expert_parts, parallel.last_change(state.step - 1))

    def wanted(self, parallel: ParallelConfig, step: int, model: DecoderConfig) -> ParallelConfig:
        """The layout that the job wants once `step` steps are finished."""
        wanted = parallel.at_step(step)
        if not parallel.is_by_load(step):
            return wanted
        if self.change == parallel.last_change(step) and self.parts:
            try:
                return replace(wanted, expert_parts=self.parts)
            except TrainValueError:  # of other ranks: the job was changed for the resume
                pass
        return self.loads.balanced(wanted, model)

    def enter(self, parallel: ParallelConfig, step: int) -> None:
        """Note that the state lies as `parallel` says; after a change rows are counted anew."""
        change = parallel.last_change(step)
        if change != self.change:
            self.loads.clear()
        self.change, self.parts = change, parallel.expert_parts


def described(parallel: ParallelConfig, imbalance: tuple[float, float]) -> str:
    """The sizes of a layout, and where its experts lie if not in equal parts.

    Args:
        imbalance: the rows of the busiest rank over those of the mean one, in the layout before and
            in this one.
    """
    told = " ".join(f"{a}={n}" for a, n in zip(SIZES, parallel.sizes, strict=True))
    if not parallel.expert_parts:
        return told
    told += f", experts {'; '.join(parallel.expert_parts)}"
    before, now = imbalance
    return f"{told} (rows of the busiest rank: {before:.2f} of the mean before, {now:.2f} now)"
