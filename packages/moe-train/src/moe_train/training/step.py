"""One optimizer step: pipeline, gradient reduction, clipping, update, and its figures.

All figures of a step travel in one small all-reduce, together with the request to stop: every rank
therefore sees the same numbers and takes the same decisions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from comm_collectives import all_reduce
from moe_pipeline import PipelineExecutor
from moe_pipeline.executor import TimeTrack, token_scale
from moe_pipeline.router import TopKRouter, update_expert_bias
from moe_train.data import Batch, check_value
from moe_train.errors import MoeTrainError
from moe_train.model import Target
from moe_train.optim import GradientStore, Optimizer, clip_coefficient
from moe_train.parallel import Parallel
from moe_train.training.batches import SamplesRead, count_predictions
from moe_train.training.memory import RankMemory
from moe_train.training.pipelines import RankStages


class BadStepError(MoeTrainError):
    """A step whose update must not be applied ends the run; nothing of it was applied."""


class NonFiniteLossError(BadStepError):
    """The loss or the gradient norm is not a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of one step, equal on every rank.

    `loss`: mean cross entropy per predicted token, in nats. `aux_loss`, `z_loss`, `mtp_loss`: of
    load balancing, router logits and multi-token prediction, coefficients included; they are not
    in `loss`. `load_LE`: routed rows per layer and expert (layers without experts are all zero;
    those of multi-token prediction come last). `stop_requested`: some rank was asked to stop;
    `save_requested`: some rank asks for a checkpoint; `relayout_requested`: for another layout.
    `applied`: the weights were updated.
    `sample_check`: `check_value` of the sequences that the ranks have read.
    """

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    grad_norm: float
    num_tokens: int
    load_LE: list[list[int]]
    stop_requested: bool
    save_requested: bool = False
    relayout_requested: bool = False
    applied: bool = False
    sample_check: int = 0


class Asked(NamedTuple):
    """What this rank asks for after a step: to stop, a checkpoint, another layout."""

    stop: bool = False
    save: bool = False
    relayout: bool = False


_NOTHING = Asked()


class _Sums(NamedTuple):
    """What is summed over all ranks after a step, besides the loads of the experts."""

    norm_squared: float
    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    stop_requests: float
    save_requests: float
    relayout_requests: float
    predicted_tokens: float
    samples_read: float
    sample_hashes: float
    hashes_apart: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Runs steps on one rank; every method is collective over all ranks of the job.

    Args:
        max_grad_norm: above it gradients are scaled down.
        updates_expert_bias: after each update of the weights move the expert biases of the routers
            that are trained.
        before_update: called before the weights change, by which what reads them has ended.
    """

    parallel: Parallel
    stages: RankStages
    executor: PipelineExecutor
    evaluator: PipelineExecutor
    gradients: GradientStore
    optimizer: Optimizer
    max_grad_norm: float
    updates_expert_bias: bool = False
    before_update: Callable[[], None] | None = None

    def train(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        asked: Asked = _NOTHING,
        max_loss: float = math.inf,
        read: SamplesRead | None = None,
        times: TimeTrack | None = None,
        memory: RankMemory | None = None,
    ) -> StepResult:
        """Forward, backward and update on this rank's microbatches.

        Args:
            batches: one per microbatch; empty on stages that need no tokens.
            lr: learning rate of the update.
            asked: what this rank asks for after the step.
            max_loss: equal on all ranks; above it, or without predicted tokens, nothing is updated.
            read: which samples the batches hold; None when nobody keeps account of them.
            times: records when the stages compute.
            memory: told what the step is busy with; None when nobody asks.

        Raises:
            NonFiniteLossError: on every rank, before the update.
            MoeTrainError: the first and the last stage have read different samples.
            RankOutOfMemoryError: this rank has no memory left; what it was busy with is named.
        """
        memory = memory or RankMemory(rank=self.parallel.rank)
        self.gradients.clear()
        self.stages.train()
        arguments = self._pipeline_arguments(batches, self._token_scale(batches))
        with memory.phase("gradients"), self.gradients.reducing() as around:
            self.executor.step(*arguments, times=times, around=memory.around(around))
            memory.label("gradients", self.gradients.held())
        read = read or SamplesRead(num_predicted=count_predictions(batches))
        result = self._share(read, self.gradients.norm_squared(), asked)
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            raise NonFiniteLossError(
                f"loss={result.loss} and gradient norm={result.grad_norm} are not finite; lower "
                "optimizer.lr, lengthen optimizer.warmup_steps, or resume an earlier checkpoint"
            )
        if result.loss > max_loss or result.num_tokens == 0:
            for router in self._biased_routers():
                router.tokens_per_expert.zero_()  # what they counted moves no bias
            return result
        coefficient = clip_coefficient(result.grad_norm, self.max_grad_norm)
        with memory.phase("optimizer"):
            if coefficient < 1.0:
                self.gradients.scale(coefficient)
            if self.before_update is not None:
                self.before_update()
            self.optimizer.step(self.gradients, lr)
        if self.updates_expert_bias:
            # Routers have counted global microbatches, so every rank moves its copies alike.
            update_expert_bias(self._biased_routers())
        return replace(result, applied=True)

    def has_finite_weights(self) -> bool:
        """Whether every weight of every rank is a finite number."""
        fault = torch.zeros(1, dtype=torch.float64, device=self.parallel.device)
        for tensor in self.optimizer.held().values():
            fault += (~torch.isfinite(tensor)).any()
        return not bool(all_reduce(fault).item())

    def _biased_routers(self) -> list[TopKRouter]:
        """The routers whose bias follows their load; not those that are frozen."""
        modules = self.stages.modules() if self.updates_expert_bias else ()
        routers = (module for module in modules if isinstance(module, TopKRouter))
        return [router for router in routers if router.weight.requires_grad]

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Sum of cross entropies over the global batch, and how many tokens were predicted."""
        self.stages.eval()
        with torch.no_grad():
            self.evaluator.step(*self._pipeline_arguments(batches, 1.0))
        read = SamplesRead(num_predicted=count_predictions(batches))
        result = self._share(read, 0.0, _NOTHING)
        return result.loss, result.num_tokens

    def _token_scale(self, batches: Sequence[Batch]) -> float:
        """1 / (predicted tokens of the step) where labels are. Collective over those ranks."""
        if not self.parallel.is_last:
            return 1.0
        # Of ranks that share their samples the first one counts all labels.
        most = None if self.parallel.counts_samples else 0
        labels = [batch.labels[:, :most].to(self.parallel.device) for batch in batches]
        return token_scale(labels, group=self.parallel.data_group)

    def _pipeline_arguments(
        self, batches: Sequence[Batch], scale: float
    ) -> tuple[list[tuple[Tensor, ...]] | None, list[object] | None]:
        device = self.parallel.device
        inputs: list[tuple[Tensor, ...]] | None = None
        targets: list[object] | None = None
        if self.parallel.is_first:
            inputs = [(b.input_ids.to(device), b.position_ids.to(device)) for b in batches]
        if self.parallel.is_last:
            targets = [Target(b.labels.to(device), scale, b.input_ids.to(device)) for b in batches]
        return inputs, targets

    def _share(self, read: SamplesRead, norm_squared: float, asked: Asked) -> StepResult:
        """The figures of the step, summed over all ranks, and what some rank has `asked` for."""
        config, record = self.stages.config, self.stages.take_record()
        counts = self.parallel.counts_samples  # ranks that share samples have read the same
        is_first, is_last = self.parallel.is_first and counts, self.parallel.is_last and counts
        shape = (config.num_hidden_layers + len(config.mtp_layers), config.num_experts)
        load_LE = torch.zeros(shape, dtype=torch.float64, device=self.parallel.device)
        if self.parallel.data_rank == 0:  # every rank of a stage has the same
            for layer, load_E in record.load_E.items():
                load_LE[layer] = load_E.double()
        own = _Sums(
            norm_squared=norm_squared,
            loss=float(record.loss),
            aux_loss=float(record.aux_loss),
            z_loss=float(record.z_loss),
            mtp_loss=float(record.mtp_loss),
            stop_requests=float(asked.stop),
            save_requests=float(asked.save),
            relayout_requests=float(asked.relayout),
            predicted_tokens=read.num_predicted if is_last else 0,
            samples_read=read.num_samples if is_first else 0,
            sample_hashes=read.hash_sum if is_first else 0,
            hashes_apart=read.hash_sum * (is_first - is_last),
        )
        own_sums = torch.tensor(own, dtype=torch.float64, device=self.parallel.device)
        total = all_reduce(torch.cat((own_sums, load_LE.flatten()))).cpu()
        sums = _Sums(*total[: len(own)].tolist())
        if sums.hashes_apart:
            raise MoeTrainError(
                "the first pipeline stage has read other samples than the last one; give every "
                "machine the same files, or empty data.cache_dir"
            )
        return StepResult(
            loss=sums.loss,
            aux_loss=sums.aux_loss,
            z_loss=sums.z_loss,
            mtp_loss=sums.mtp_loss,
            grad_norm=math.sqrt(sums.norm_squared) if sums.norm_squared >= 0 else math.nan,
            num_tokens=int(sums.predicted_tokens),
            load_LE=[[int(v) for v in row] for row in total[len(own) :].view(shape).tolist()],
            stop_requested=sums.stop_requests > 0,
            save_requested=sums.save_requests > 0,
            relayout_requested=sums.relayout_requests > 0,
            sample_check=check_value(int(sums.samples_read), int(sums.sample_hashes)),
        )


def step_metrics(result: StepResult) -> dict[str, object]:
    """The figures of a step under the names of the metrics files."""
    values: dict[str, object] = {
        "loss": result.loss if result.num_tokens else math.nan,  # null: nothing was predicted
        "aux_loss": result.aux_loss,
        "grad_norm": result.grad_norm,
    }
    optional = {"z_loss": result.z_loss, "mtp_loss": result.mtp_loss}
    values |= {name: value for name, value in optional.items() if value}
    worst = 0.0
    for layer, load_E in enumerate(result.load_LE):
        total = sum(load_E)
        if total:
            values[f"expert_load/{layer}"] = load_E
            worst = max(worst, max(load_E) * len(load_E) / total)
    values["expert_load_max_over_mean"] = worst
    return values
