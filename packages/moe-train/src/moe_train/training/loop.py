"""The training loop, to be read from top to bottom.

    step -> figures -> (validation) -> (checkpoint) -> next step, until max_steps or a stop

Everything that decides how the loop goes on is equal on every rank: step numbers and the figures
of `StepRunner`, which come out of one all-reduce.

    loop = TrainingLoop.begin(config, training, reporter, state)      # state: of a checkpoint
    saved = loop.run(context)
"""

import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_train.checkpoint import TrainerState
from moe_train.config import Config
from moe_train.data import Batch, Ledger
from moe_train.errors import TrainValueError
from moe_train.optim import LrSchedule
from moe_train.parallel import Parallel, Sizes, start
from moe_train.rank import RankContext
from moe_train.report import MetricsLog, ProgressLine
from moe_train.training.batches import BatchPlan, SampleReader, validation_steps
from moe_train.training.build import Training, check_layout
from moe_train.training.layout_in_force import LayoutInForce, described
from moe_train.training.layout_request import LayoutRequests
from moe_train.training.loader import BatchLoader
from moe_train.training.memory import RankMemory
from moe_train.training.pace import Pace
from moe_train.training.relayout import relaid_out
from moe_train.training.routing_files import RoutingFiles
from moe_train.training.saving import Saver
from moe_train.training.sent_bytes import sent_bytes
from moe_train.training.spikes import SpikeGuard
from moe_train.training.step import Asked, BadStepError, StepResult, step_metrics
from moe_train.training.timeline import TIMED_STEP, TIMELINE_FILE, Timeline
from unified_ckpt.files.storage import Location

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Position:
    """How far the run has come: finished steps, samples used, and which each step used."""

    step: int = 0
    consumed_samples: int = 0
    ledger: Ledger = field(default_factory=Ledger, compare=False)


@dataclass(frozen=True, slots=True)
class Reporter:
    """What rank 0 writes for people; other ranks have no reporter."""

    metrics: MetricsLog
    progress: ProgressLine

    def close(self) -> None:
        """Flush the files and leave the terminal in order."""
        self.progress.close()
        try:
            self.metrics.close()
        except OSError as error:
            logger.warning("warning: the end of %s is not written: %s", self.metrics.path, error)


@dataclass(slots=True)
class TrainingLoop:
    """Runs steps until `max_steps` or until any rank is asked to stop.

    Where `parallel.relayout` says so, the loop goes on with another `training`, which holds the
    same state in another layout.

    Args:
        training: what the steps are made of.
        reporter: on rank 0 only.
        position: where to start; kept up to date while the loop runs.
        schedule: the learning rate of every step.
        guard: tells which loss is too high.
        saver: writes the checkpoints.
        turns: where those of a mixture of sources begin that are known.
        in_force: the layout of the steps, and the loads of the experts in it.
        memory: told what this rank is busy with.
        places: where this rank has stood in the layouts so far, by their sizes.
    """

    config: Config
    training: Training
    reporter: Reporter | None
    position: Position
    schedule: LrSchedule
    guard: SpikeGuard
    saver: Saver
    turns: tuple[int, ...] = ()
    in_force: LayoutInForce = field(default_factory=LayoutInForce)
    memory: RankMemory = field(default_factory=RankMemory)
    places: dict[Sizes, Parallel] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        config: Config,
        training: Training,
        reporter: Reporter | None,
        state: TrainerState | None = None,
        *,
        memory: RankMemory | None = None,
    ) -> "TrainingLoop":
        """The loop of a new run, or of one that goes on from `state`; `memory` as of the class.

        Raises:
            ValueError: the learning rate cannot go on as the job asks.
        """
        position, guard = Position(), SpikeGuard.of(config)
        schedule = LrSchedule.of(config.optimizer, config.train.max_steps)
        if state is not None:
            position = Position(state.step, state.consumed_samples, state.ledger)
            skipped, before = (state.skips_in_row, state.skipped_steps), state.schedule or schedule
            guard = SpikeGuard.of(config, state.recent_losses, *skipped)
            schedule = before.resumed(state.step, config.optimizer, config.train.max_steps)
        saver = Saver(
            checkpointer=training.checkpointer,
            config=config,
            is_first=training.parallel.rank == 0,
            first_step=position.step,
            best_validation_loss=None if state is None else state.best_validation_loss,
        )
        return cls(
            config=config,
            training=training,
            reporter=reporter,
            position=position,
            schedule=schedule,
            guard=guard,
            saver=saver,
            turns=() if state is None else state.mixture_begin,
            in_force=LayoutInForce.of(config.parallel, state),
            memory=memory or RankMemory(rank=training.parallel.rank),
        )

    @property
    def plan(self) -> BatchPlan:
        """How a global batch is cut for this rank."""
        parallel = self.training.parallel
        return BatchPlan(
            global_batch_size=self.config.train.global_batch_size,
            num_microbatches=self.config.train.gradient_accumulation_steps,
            sample_rank=parallel.sample_rank,
            num_sample_ranks=parallel.num_sample_ranks,
        )

    def run(self, context: RankContext) -> Path | Location | None:
        """Train; collective over all ranks. Return the last checkpoint written, if any.

        A checkpoint that could not be written does not end the loop: see `saver.check`.

        Args:
            context: asked after every step whether to stop, and told the finished steps.

        Raises:
            BadStepError: a step's update must not be applied; the state before it is saved.
        """
        requests = self._requests
        while self.position.step < self.config.train.max_steps:
            self._enter_layout()
            with self._loader() as loader:
                result = self._run(context, loader)
            if result.stop_requested:
                break
            if result.relayout_requested:
                self._plan_layout(requests.take())
        self.saver.finish()
        return self.saver.saved

    @property
    def _requests(self) -> LayoutRequests:
        return LayoutRequests(self.config.log_folder, self.training.parallel.rank == 0)

    def _plan_layout(self, asked: tuple[Sizes, str] | None) -> None:
        """Make the next step begin in the layout that was asked for, if the job fits it."""
        if asked is None:
            return
        model = self.training.runner.stages.config
        try:
            parallel = self.config.parallel.changed(self.position.step, *asked)
            check_layout(replace(self.config, parallel=parallel), model)
        except TrainValueError as error:
            if self.training.parallel.rank == 0:
                logger.warning("warning: the layout stays: %s", error)
            return
        self.config = replace(self.config, parallel=parallel)

    def _enter_layout(self) -> None:
        """Bring the state into the layout of the step that comes. Collective over all ranks."""
        here, step = self.config.parallel, self.position.step
        self.places.setdefault(here.sizes, self.training.parallel)
        wanted = self.in_force.wanted(here, step, self.training.runner.stages.config)
        imbalance = self.in_force.loads.imbalance(here), self.in_force.loads.imbalance(wanted)
        self.in_force.enter(wanted, step)
        if wanted == here:
            return
        self.config = replace(self.config, parallel=wanted)
        if wanted.sizes not in self.places:
            self.places[wanted.sizes] = start(self.config)
        parallel = self.places[wanted.sizes]
        updates = step - self.guard.skipped
        with self.memory.phase("new layout"):
            self.training, moved = relaid_out(self.config, parallel, self.training, updates=updates)
            self.memory.label("parameters", self.training.runner.stages.parameters())
        gc.collect()  # modules and their parameters refer to each other
        if parallel.rank == 0:
            text = "step %d begins in the layout %s; %s"
            logger.info(text, step + 1, described(wanted, imbalance), moved)

    def first_steps(self, count: int, context: RankContext) -> Iterator[StepResult]:
        """The results of the next steps, at most `count`, without validation and checkpoints, up to
        that of which any rank was asked to stop. Collective over all ranks, which take as many.
        """
        with self._loader() as loader:
            for _ in range(min(count, self.config.train.max_steps - self.position.step)):
                yield (result := self._step(loader, stop=context.stop_requested))
                if result.stop_requested:
                    return

    def _run(self, context: RankContext, loader: BatchLoader) -> StepResult:
        """Run steps until the layout changes or the run ends; return the figures of the last."""
        train, pace = self.config.train, Pace(limit_s=60 * self.config.train.exit_duration_minutes)
        until = self.config.parallel.next_change(self.position.step) or train.max_steps
        while True:
            try:
                is_over = pace.is_last(context.age_s, self.saver.longest_s)
                with pace.step():
                    stop = context.stop_requested or is_over or bool(self.saver.stop_reason)
                    result = self._step(loader, stop=stop, timeline=self._timeline())
            except BadStepError as error:
                raise type(error)(f"{error}; {self._save_before_error()}") from error
            step = context.step = self.position.step
            last, stopping = step == train.max_steps, result.stop_requested
            if not stopping and (last or _due(step, train.validation_interval_steps)):
                with self.memory.phase("validation"), pace.validation():
                    self.saver.note_validation(step, self._validate())
            if self.saver.is_due(step, result) or stopping or last:
                with self.memory.phase("checkpoint"):
                    self.saver.save(self._state(), at_end=stopping or last)
            else:
                self.saver.update_average(step)
                if self.saver.is_due_on_nodes(step):
                    self.saver.save_on_nodes(self._state())
            self.saver.look()
            context.is_finished, context.out_of_time = last, stopping and is_over and not last
            if context.out_of_time and self.reporter is not None:
                logger.info("train.exit_duration_minutes ends the job after step %d", step)
            if stopping or last or step == until or result.relayout_requested:
                return result

    def _step(
        self, loader: BatchLoader, *, stop: bool, timeline: Timeline | None = None
    ) -> StepResult:
        """One step; where the guard leaves out its update, its samples are used up all the same."""
        started = time.perf_counter()
        step = loader.load(self.position.consumed_samples)
        self.turns = step.turns or self.turns
        loaded = time.perf_counter()
        lr = self.schedule.rate(self.position.step + 1)
        self.training.runner.stages.begin_step(self.position.step + 1)
        counting = sent_bytes(self.config, self.training.parallel)
        with self._routing(), self.memory.step(self.position.step + 1), counting as sent:
            result = self.training.runner.train(
                step.batches,
                lr=lr,
                asked=Asked(stop, self.saver.is_late(), self._requests.is_waiting()),
                max_loss=self.guard.max_loss,
                read=step.read,
                times=None if timeline is None else timeline.times,
                memory=self.memory,
            )
        self.guard.note(result, self.position.step + 1)
        self.in_force.loads.add(result.load_LE)
        self._advance(result)
        elapsed_s = time.perf_counter() - started
        figures = step_metrics(result) | sent
        if self.guard.skipped:
            figures["skipped_steps"] = self.guard.skipped
        if timeline is not None:
            runner, path = self.training.runner, self.config.log_folder / TIMELINE_FILE
            figures |= timeline.finish(runner.executor.schedule, path)
        self._report(figures, lr=lr, data_time_s=loaded - started, step_time_s=elapsed_s)
        return result

    def _routing(self) -> AbstractContextManager[None]:
        """Keeps the choices of experts of the step that comes, or gives it those of another run."""
        training, position = self.training, self.position
        files = RoutingFiles.of(self.config, training.corpus.data, training.parallel)
        samples = self.plan.samples(position.consumed_samples)
        return files.step(position.step + 1, training.runner.stages, samples)

    def _timeline(self) -> Timeline | None:
        """What times the step that comes, if it is the one that is drawn."""
        parallel = self.training.parallel
        is_drawn = self.position.step - self.saver.first_step == TIMED_STEP - 1
        return Timeline(parallel) if is_drawn and parallel.num_stages > 1 else None

    def _save_before_error(self) -> str:
        if not self.training.runner.has_finite_weights():
            return (
                f"the weights after step {self.position.step} are not finite themselves, so they "
                "are not saved; resume an earlier checkpoint"
            )
        return self.saver.save_before_error(self._state())

    def _advance(self, result: StepResult) -> None:
        """Note a finished step, and which samples it has read."""
        position, size = self.position, self.config.train.global_batch_size
        position.step += 1
        position.ledger.record(
            step=position.step,
            first_sample=position.consumed_samples,
            global_batch_size=size,
            data=self.training.corpus.data,
            check=result.sample_check,
            skipped=not result.applied,
        )
        position.consumed_samples += size

    def _loader(self) -> BatchLoader:
        """The batches of all steps that are left."""
        train, corpus = self.config.train, self.training.corpus
        first, size = self.position.consumed_samples, train.global_batch_size
        return BatchLoader(
            SampleReader(corpus.train, corpus.data, self.plan, self.turns),
            self.training.parallel.device,
            range(first, first + (train.max_steps - self.position.step) * size, size),
            depth=self.config.data.prefetch_batches,
            timeout_s=self.config.parallel.timeout_s,
        )

    def _validate(self) -> float:
        total, count = 0.0, 0
        for batches in self._validation_batches():
            loss, tokens = self.training.runner.evaluate(batches)
            total, count = total + loss, count + tokens
        mean = total / count if count else math.nan  # of no token there is no mean
        self._report({"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 700.0))})
        return mean

    def _validation_batches(self) -> Iterable[list[Batch]]:
        count = min(
            self.config.train.validation_sequences,
            self.training.corpus.facts.num_validation_sequences,
        )
        if self.training.corpus.validation is None:
            return [[] for _ in range(0, count, self.plan.global_batch_size)]
        return validation_steps(self.training.corpus.validation, count, self.plan)

    def _state(self) -> TrainerState:
        return TrainerState(
            step=self.position.step,
            consumed_samples=self.position.consumed_samples,
            data_fingerprint=self.training.corpus.facts.fingerprint,
            sequence_length=self.config.data.sequence_length,
            seed=self.config.train.seed,
            schedule=self.schedule,
            skipped_steps=self.guard.skipped,
            skips_in_row=self.guard.skips_in_row,
            recent_losses=tuple(self.guard.losses),
            best_validation_loss=self.saver.best_validation_loss,
            expert_parts=self.in_force.parts,
            expert_rows=tuple(map(tuple, self.in_force.loads.rows_LE)),
            mixture_begin=self.turns,
            ledger=self.position.ledger,
        )

    def _report(self, values: Mapping[str, object], **times: float) -> None:
        step = self.position.step
        logged = _due(step, self.config.log.interval_steps) or step == self.config.train.max_steps
        if self.reporter is None or ("loss" in values and not logged):
            return
        sequence_tokens = self.config.train.global_batch_size * self.config.data.sequence_length
        merged = {**values, **times}
        if "step_time_s" in times:
            merged["tokens_per_s"] = sequence_tokens / times["step_time_s"]
            merged["data_wait_fraction"] = times["data_time_s"] / times["step_time_s"]
            merged["consumed_samples"] = self.position.consumed_samples
            if stall_s := self.saver.take_stall():
                merged["save_stall_s"] = stall_s
        try:
            self.reporter.metrics.write(self.position.step, merged)
        except OSError as error:  # a full disk must not end what can still be trained
            logger.warning("warning: step %d has no line in the metrics: %s", step, error)
        self.reporter.progress.update(self.position.step, merged)


def _due(step: int, interval_steps: int) -> bool:
    return step % interval_steps == 0
