"""What the ranks of a pipeline did in one step, as a picture beside the metrics: `schedule.svg`.

One step of a run is timed, late enough that nothing is done for the first time. The figures are the
share of time in which a rank of the pipeline waits, and the same as the simulator finds it for the
times that the stages took.

    picture = Timeline(parallel)
    runner.train(batches, lr=lr, times=picture.times)
    figures = picture.finish(schedule, folder / TIMELINE_FILE)
"""

import logging
from pathlib import Path
from typing import final

import torch.distributed as dist

from moe_pipeline import Schedule
from moe_pipeline.executor import TimeTrack
from moe_pipeline.schedules import Simulation, simulate
from moe_pipeline.schedules.views import to_svg
from moe_train.parallel import Parallel

TIMELINE_FILE = "schedule.svg"
TIMED_STEP = 3
"""Of the steps that a process runs."""

logger = logging.getLogger(__name__)


@final
class Timeline:
    """The times of one step; made right before it."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self.times = TimeTrack(parallel.device)

    def finish(self, schedule: Schedule, path: Path) -> dict[str, float]:
        """Draw the first pipeline's step. Collective over the ranks of each pipeline.

        Returns:
            Figures of this rank's own pipeline.
        """
        rows = [self.times.spans()] * self._parallel.num_stages
        dist.all_gather_object(rows, self.times.spans(), group=self._parallel.forward_group)
        found = Simulation.measured(rows)
        simulated = simulate(schedule, found.costs()).bubble
        if self._parallel.rank == 0:
            note = f", {100 * simulated:.1f} % simulated with the stages' own times"
            try:
                path.write_text(to_svg(schedule, found=found, note=note), encoding="utf-8")
            except OSError as error:  # a full disk must not end what can still be trained
                logger.warning("warning: the step is not drawn: %s", error)
        return {"pipeline_bubble": found.bubble, "simulated_bubble": simulated}
