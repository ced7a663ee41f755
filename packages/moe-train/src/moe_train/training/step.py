"""One optimizer step: pipeline, gradient reduction, clipping, update, and its figures.

All figures of a step travel in one small all-reduce, together with the request to stop: every rank
therefore sees the same numbers and takes the same decisions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comm_collectives import all_reduce
from moe_pipeline import PipelineExecutor, TopKRouter, update_expert_bias
from moe_train.data import Batch
from moe_train.errors import MoeTrainError
from moe_train.model import DecoderStage, StageRecord, Target
from moe_train.optim import AdamW, GradientStore, clip_coefficient
from moe_train.parallel import Parallel
from moe_train.training.batches import count_predictions

_HEAD = 7  # norm^2, loss, three losses beside it, stop requests, predicted tokens


class NonFiniteLossError(MoeTrainError):
    """The loss or the gradient norm is not a finite number; nothing of the step was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of one step, equal on every rank.

    `loss`: mean cross entropy per predicted token, in nats. `aux_loss`, `z_loss`, `mtp_loss`: of
    load balancing, router logits and multi-token prediction, coefficients included; they are not
    in `loss`. `load_LE`: routed rows per layer and expert (layers without experts are all zero;
    those of multi-token prediction come last). `stop_requested`: some rank was asked to stop.
    """

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    grad_norm: float
    num_tokens: int
    load_LE: list[list[int]]
    stop_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Runs steps on one rank; every method is collective over all ranks of the job.

    Args:
        max_grad_norm: 0 does not clip.
        updates_expert_bias: after each update of the weights move the routers' expert biases.
    """

    parallel: Parallel
    stage: DecoderStage
    executor: PipelineExecutor
    evaluator: PipelineExecutor
    gradients: GradientStore
    optimizer: AdamW
    max_grad_norm: float
    updates_expert_bias: bool = False

    def train(self, batches: Sequence[Batch], *, lr: float, stop: bool = False) -> StepResult:
        """Forward, backward and update on this rank's micro-batches.

        Args:
            batches: one per micro-batch; empty on stages that need no tokens.
            lr: learning rate of the update.
            stop: this rank was asked to stop after the step.

        Raises:
            NonFiniteLossError: on every rank, before the update.
        """
        num_tokens = self._num_tokens(batches)
        self.gradients.clear()
        self.stage.train()
        self.executor.step(*self._pipeline_arguments(batches, 1.0 / max(num_tokens, 1)))
        self.gradients.reduce()
        result = self._share(
            self.stage.take_record(), self.gradients.norm_squared(), num_tokens, stop
        )
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            raise NonFiniteLossError(
                f"loss={result.loss} and gradient norm={result.grad_norm} are not finite; lower "
                "optimizer.lr, lengthen optimizer.warmup_steps, or resume an earlier checkpoint"
            )
        coefficient = clip_coefficient(result.grad_norm, self.max_grad_norm)
        if coefficient < 1.0:
            self.gradients.scale(coefficient)
        self.optimizer.step(self.gradients, lr)
        if self.updates_expert_bias:
            # Routers have counted global micro-batches, so every rank moves its copies alike.
            update_expert_bias(m for m in self.stage.modules() if isinstance(m, TopKRouter))
        return result

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Sum of cross entropies over the global batch, and how many tokens were predicted."""
        num_tokens = self._num_tokens(batches)
        self.stage.eval()
        with torch.no_grad():
            self.evaluator.step(*self._pipeline_arguments(batches, 1.0))
        result = self._share(self.stage.take_record(), 0.0, num_tokens, False)
        return result.loss, result.num_tokens

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

    def _num_tokens(self, batches: Sequence[Batch]) -> int:
        """Predicted tokens of the global batch; known to the last stage, 0 elsewhere."""
        if not self.parallel.is_last:
            return 0
        count = torch.tensor([count_predictions(batches)], device=self.parallel.device)
        return int(all_reduce(count, group=self.parallel.data_group))

    def _share(
        self, record: StageRecord, norm_squared: float, num_tokens: int, stop: bool
    ) -> StepResult:
        config = self.stage.config
        shape = (config.num_hidden_layers + len(config.mtp_layers), config.num_experts)
        one_of_stage = self.parallel.data_rank == 0
        load_LE = torch.zeros(shape, dtype=torch.float64, device=self.parallel.device)
        if one_of_stage:
            for layer, load_E in record.load_E.items():
                load_LE[layer] = load_E.double()
        head = [
            norm_squared,
            float(record.loss),
            float(record.aux_loss),
            float(record.z_loss),
            float(record.mtp_loss),
            float(stop),
            float(num_tokens if one_of_stage else 0),
        ]
        head_tensor = torch.tensor(head, dtype=torch.float64, device=self.parallel.device)
        total = all_reduce(torch.cat((head_tensor, load_LE.flatten()))).cpu()
        square, loss, aux_loss, z_loss, mtp_loss, stops, tokens = total[:_HEAD].tolist()
        return StepResult(
            loss=loss,
            aux_loss=aux_loss,
            z_loss=z_loss,
            mtp_loss=mtp_loss,
            grad_norm=math.sqrt(square) if square >= 0 else math.nan,
            num_tokens=int(tokens),
            load_LE=[[int(v) for v in row] for row in total[_HEAD:].view(shape).tolist()],
            stop_requested=stops > 0,
        )
