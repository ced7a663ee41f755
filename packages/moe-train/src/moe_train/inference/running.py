"""A job that uses a checkpoint without training it, on one process or several.

With a layout of one process it runs here; otherwise ranks are started, or this is one of those that
torchrun, srun or mpirun has started. A job is plain data, which ranks get as JSON.

    stopped_by = run_inference(run_generate, asdict(job), options)    # None: ran to the end
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from moe_train.config import ParallelConfig
from moe_train.errors import TrainValueError
from moe_train.generation import GenerationOptions, ModelOptions, ModelRanks, open_model
from moe_train.launch import run_local
from moe_train.parallel import join, set_num_threads
from moe_train.rank import (
    RankContext,
    RankJobError,
    RankPlace,
    find_place,
    leave,
    run_rank,
    watch_stop_signals,
)
from unified_ckpt.files.storage import Location

Runner = Callable[[str, RankContext], None]
"""What a rank runs: the job as JSON, and what asks it to stop."""

_STOPPING = "ending; a second signal (Ctrl-C) ends at once"
_RANK_MODULE = "moe_train.inference.inference_rank"
_Job = TypeVar("_Job")


def run_inference(
    runner: Runner, job: Mapping[str, Any], options: ModelOptions
) -> signal.Signals | None:
    """Run a job on all ranks of the layout until it ends.

    Args:
        runner: one of those that `moe_train.inference.inference_rank` knows.
        job: plain data.
        options: with the layout.

    Returns:
        The signal on which the ranks stopped early; None: they ran to the end.

    Raises:
        ValueError: another number of ranks was started than the layout has.
        RankFailedError: a rank failed or was killed; the message names it.
    """
    text = json.dumps(job)
    argv = [runner.__name__, text]
    place = find_place(os.environ)
    if place is not None:
        os.environ.update(place.variables())
        return _run_as_rank(argv, options, place)
    if options.parallel.world_size > 1:
        size = options.parallel.world_size
        return run_local(size, _RANK_MODULE, argv, stop_grace_s=60.0, stop_text=_STOPPING)
    runner(text, RankContext())
    return None


@contextmanager
def model_of_rank(
    checkpoint: Path, options: ModelOptions, weights: Path | Location | None = None
) -> Iterator[ModelRanks]:
    """This rank's part of the model, joined with the others. Collective."""
    if options.parallel.world_size == 1:
        yield open_model(checkpoint, options, None, weights)
        return
    set_num_threads()
    parallel = join(options.parallel, options.device)
    yield open_model(checkpoint, options, parallel, weights)
    dist.barrier()
    dist.destroy_process_group()


def job_from_json(kind: type[_Job], text: str) -> _Job:
    """A job out of the JSON of its `dataclasses.asdict`; has `model`, and `options` of a text."""
    values = json.loads(text)
    model = values["model"]
    values["model"] = ModelOptions(**{**model, "parallel": ParallelConfig(**model["parallel"])})
    if "options" in values:
        values["options"] = GenerationOptions(**values["options"])
    return kind(**values)


def _run_as_rank(argv: list[str], options: ModelOptions, place: RankPlace) -> signal.Signals | None:
    """Run as one of the ranks that another program has started; a failure ends the process."""
    wanted, sizes = options.parallel.world_size, options.parallel
    if place.world_size != wanted:
        raise TrainValueError(
            f"{place.started_by} has started {place.world_size} ranks, but the layout "
            f"pp={sizes.pp} dp={sizes.dp} ep={sizes.ep} has {wanted}; start {wanted} ranks "
            f"({place.remedy.format(wanted)}) or change --pp, --dp or --ep"
        )
    context = watch_stop_signals()
    try:
        run_rank(_RANK_MODULE, argv, context)
    except RankJobError as failure:
        print(f"rank {place.rank}: {failure.error.text}", file=sys.stderr)
        leave(1)
    return next(iter(context.signals.seen), None)
