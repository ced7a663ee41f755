"""The tables that say how a job is trained: how long, on what, with which batches.

TrainConfig(output_dir="runs/a", max_steps=1000, global_batch_size=32)
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError

_KEPT = ("matrix_products", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Table):
    """How long, on what and with which batches the job trains."""

    table: ClassVar[str] = "train"
    output_dir: str = key(
        "folder for checkpoints, metrics and plots; or for checkpoints a URL (s3://bucket/run, "
        "gs://, az://, file://), with log.dir for the rest",
        unit=PATH,
        on_resume="free",
    )
    seed: int = key(
        "seed of the weights and of the order of the data", default=0, minimum=0, on_resume="asked"
    )
    max_steps: int = key(
        "optimizer steps of the whole run", unit="steps", minimum=1, on_resume="free"
    )
    global_batch_size: int = key(
        "sequences of one optimizer step, over all ranks",
        unit="sequences",
        minimum=1,
        on_resume="free",
    )
    gradient_accumulation_steps: int = key(
        "global microbatches that one optimizer step is cut into (those of the pipeline)",
        unit="microbatches",
        default=1,
        minimum=1,
        on_resume="free",
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "number format of parameters and activations", default="float32", on_resume="free"
    )
    master_weights: bool = key(
        "keep float32 copies of bfloat16 parameters in the optimizer",
        default=False,
        on_resume="free",
    )
    stochastic_rounding: bool = key(
        "update bfloat16 weights in float32 and round them up or down by chance, so that small "
        "updates are not lost; without master weights, moments are float32 (AdamW only)",
        default=False,
        on_resume="free",
    )
    grad_reduce_dtype: Literal["float32", "bfloat16"] | None = key(
        "number format in which gradients are summed over ranks; absent: that in which they are "
        "summed over microbatches (float32 with master_weights, else train.dtype)",
        default=None,
        on_resume="free",
    )
    gradient_accumulation_fusion: bool = key(
        "from the second microbatch on add weight gradients in place, to save time and memory",
        default=False,
        on_resume="free",
    )
    recompute: Literal["layers", "selective", "outputs"] | None = key(
        "what the backward computes again instead of keeping it, with the same routing: whole "
        "layers; layers without the operations of recompute_keep; or the outputs of norms and "
        "activations alone",
        default=None,
        on_resume="free",
    )
    recompute_keep: tuple[str, ...] = key(
        'operations whose results recompute="selective" keeps: matrix_products, attention, or '
        'names of torch such as "aten.mm.default"',
        default=_KEPT,
        on_resume="free",
    )
    offload_activations: bool = key(
        "what forwards keep for their backward waits in the host's memory (CUDA only)",
        default=False,
        on_resume="free",
    )
    offload_optimizer: bool = key(
        "moments and master weights live in the host's memory, and visit the device piece by piece "
        "to be updated; for CUDA, elsewhere they are only copied to and fro",
        default=False,
        on_resume="free",
    )
    loss_chunk_tokens: int | None = key(
        "logits are computed for this many tokens at a time, to save memory; absent: for all",
        unit="tokens",
        default=None,
        minimum=1,
        on_resume="free",
    )
    trainable: tuple[str, ...] = key(
        "patterns (fnmatch) of the parameters to train, by transformers' names; with ! in front: "
        "not to train; the last that matches decides, and all others are frozen; absent: train all",
        default=(),
        on_resume="free",
    )
    mtp_loss_coef: float = key(
        "factor of the loss of the multi-token prediction layers (num_nextn_predict_layers of "
        "config.json); with 0 they are not trained",
        default=0.3,
        minimum=0,
        on_resume="asked",
    )
    exit_duration_minutes: float = key(
        "save and end before the command is so old (exit code 143, as after SIGTERM), for "
        "schedulers that end jobs at a time; room is left for the longest step, validation and "
        "save so far; inf: no such end",
        unit="minutes",
        default=math.inf,
        above=0,
        maximum=math.inf,
        on_resume="free",
    )
    validation_interval_steps: int = key(
        "steps between validations; the end of the run is always validated",
        unit="steps",
        default=50,
        minimum=1,
        on_resume="free",
    )
    validation_sequences: int = key(
        "sequences of the held-out text that one validation reads",
        unit="sequences",
        default=64,
        minimum=1,
        on_resume="free",
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "where to train; auto takes CUDA when there is a device for each local rank",
        default="auto",
        on_resume="free",
    )
    threads_per_rank: int | None = key(
        "CPU threads of each rank; absent: the machine's cores divided by its ranks",
        unit="threads",
        default=None,
        minimum=1,
        on_resume="free",
    )

    loss_spike_threshold: float | None = key(
        "a loss above this multiple of the median of the last losses is a spike; absent: no guard",
        unit="times the median",
        default=None,
        above=1,
        on_resume="free",
    )
    loss_spike_window: int = key(
        "losses of which the median is taken; the guard begins when there are so many",
        unit="steps",
        default=32,
        minimum=2,
        on_resume="free",
    )
    on_loss_spike: Literal["stop", "skip"] = key(
        "at a spike save the state before it and stop, or leave out the update and go on",
        default="stop",
        on_resume="free",
    )
    max_skipped_steps: int = key(
        "spikes in a row that are left out; the next one stops the run",
        unit="steps",
        default=3,
        minimum=1,
        on_resume="free",
    )

    @property
    def state_dtype(self) -> str:
        """The number format of moments, and of what is updated."""
        return "float32" if self.master_weights or self.stochastic_rounding else self.dtype

    def _check(self) -> None:
        if self.on_loss_spike == "skip" and self.loss_spike_threshold is None:
            raise TrainValueError(
                'train.on_loss_spike="skip" leaves out no update without '
                "train.loss_spike_threshold, which says what a spike is; set that too"
            )
        if self.master_weights and self.dtype == "float32":
            raise TrainValueError(
                'train.master_weights=true has no use with train.dtype="float32"; '
                'set train.dtype="bfloat16" or leave master_weights out'
            )
        if self.stochastic_rounding and (self.master_weights or self.dtype == "float32"):
            raise TrainValueError(
                "train.stochastic_rounding=true is for bfloat16 weights without copies, not for "
                f'train.dtype="{self.dtype}" with train.master_weights='
                f"{str(self.master_weights).lower()}; choose one of them"
            )
        if self.recompute_keep != _KEPT and self.recompute != "selective":
            raise TrainValueError(
                f"train.recompute_keep={list(self.recompute_keep)} "
                'is for train.recompute="selective"; set that, or leave it out'
            )
        if self.recompute == "selective" and not self.recompute_keep:
            raise TrainValueError(
                "train.recompute_keep=[] keeps nothing, which is "
                'train.recompute="layers"; set that, or name operations'
            )
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise TrainValueError(batch_message(self, "", self.gradient_accumulation_steps))


def batch_message(train: TrainConfig, layout: str, divisor: int) -> str:
    """The message for a batch that cannot be cut into equal parts; `layout` names the ranks."""
    batch, below = train.global_batch_size, train.global_batch_size // divisor * divisor
    choices = f"{below} or {below + divisor}" if below else f"{divisor}"
    return (
        f"train.global_batch_size={batch} does not divide by train.gradient_accumulation_steps="
        f"{train.gradient_accumulation_steps}{layout} = {divisor}; choose {choices}"
    )
