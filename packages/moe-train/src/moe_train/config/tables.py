"""The configuration of a training job: one frozen dataclass for each table of the TOML file.

A `Config` is plain data, made once and never changed; whatever can be checked without the model or
the corpus is checked when it is made. Every field carries its help text and unit, from which
`moe-train train --help` and the messages are made. Files are read by `moe_train.config.toml_file`.

    config = load_config(Path("examples/python_stdlib.toml"), ["train.max_steps=50"])
    config.parallel.pp, config.world_size
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moe_train.config.keys import KeyInfo, Table, key, keys_of
from moe_train.errors import TrainValueError, check_type

PYTHON_STDLIB = "python_stdlib"
"""Name of the built-in corpus: the standard library source of the running interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Table):
    """Which model is trained."""

    table: ClassVar[str] = "model"
    config_file: str | None = key(
        "path of the model's config.json as transformers writes it; not used with init_from",
        default=None,
        is_path=True,
    )
    init_from: str | None = key(
        "folder of a transformers checkpoint to start from; absent: random weights",
        default=None,
        is_path=True,
    )
    experts_implementation: Literal["auto", "fused", "grouped_mm", "loop"] = key(
        "how the experts' matrix products are computed; auto picks the fastest for the device",
        default="auto",
    )

    @property
    def source(self) -> str:
        """Where the model is described: `init_from` if it is given, else `config_file`."""
        return str(self.config_file if self.init_from is None else self.init_from)

    def _check(self) -> None:
        if self.config_file is None and self.init_from is None:
            raise TrainValueError(
                "[model] names no model; set model.config_file to a config.json, or "
                "model.init_from to a folder that holds one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTable(Table):
    """Balancing and capacity of the experts; routers compute in fp32 whatever train.dtype is."""

    table: ClassVar[str] = "moe"
    aux_loss_scope: Literal["microbatch", "sequence", "global_batch"] = key(
        "tokens over which the load-balancing loss takes its means: a global microbatch, each "
        "sequence, or all microbatches of a step (only with parallel.schedule="
        '"forward_then_backward" or one microbatch)',
        default="microbatch",
    )
    aux_loss_coef: float | None = key(
        "factor of the load-balancing loss, 0 for none; absent: that of config.json "
        "(router_aux_loss_coef)",
        default=None,
        minimum=0,
    )
    z_loss_coef: float = key(
        "factor of the mean squared logsumexp of the router's logits; 0 for none",
        default=0.0,
        minimum=0,
    )
    capacity_factor: float | None = key(
        "most tokens of an expert, over an even share of the global microbatch; absent: no limit",
        default=None,
        above=0,
    )
    token_drop_policy: Literal["probs", "position"] = key(
        "which tokens a full expert keeps: the most probable or the first ones", default="probs"
    )
    update_expert_bias: bool = key(
        "balance without a loss: move the bias that chooses experts towards even load after each "
        "step (families with e_score_correction_bias)",
        default=False,
    )
    expert_bias_update_rate: float = key(
        "how far the expert bias moves in a step", default=1e-3, above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Table):
    """Which text is trained on, and how it is cut into sequences."""

    table: ClassVar[str] = "data"
    corpus: tuple[str, ...] = key(
        f'text to train on: "{PYTHON_STDLIB}" (source of the running interpreter\'s standard '
        "library), folders, files or globs",
        default=(PYTHON_STDLIB,),
        is_path=True,
    )
    extensions: tuple[str, ...] = key(
        'endings of the files taken from folders; "*" takes every text file', default=(".py",)
    )
    sequence_length: int = key("length of a sequence", unit="tokens", default=256, minimum=1)
    validation_fraction: float = key(
        "share of the text, in whole documents, held out for validation",
        unit="fraction of bytes",
        default=0.02,
        above=0,
        maximum=0.5,
    )
    reset_at_documents: bool = key(
        "restart positions and attention at each document; false attends across documents",
        default=True,
    )
    max_bytes: int | None = key(
        "use about this much of the corpus, in whole documents; absent: all of it",
        unit="bytes",
        default=None,
        minimum=1,
    )
    cache_dir: str | None = key(
        "folder for tokenizers and token files; absent: moe-train in the user's cache folder",
        default=None,
        is_path=True,
    )

    def _check(self) -> None:
        if not self.corpus or not all(self.corpus):
            raise TrainValueError(
                f'data.corpus={list(self.corpus)} names no text; use ["{PYTHON_STDLIB}"]'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(Table):
    """How text becomes tokens."""

    table: ClassVar[str] = "tokenizer"
    vocab_size: int = key(
        "entries of the byte-level BPE vocabulary to train; not used with file",
        unit="tokens",
        default=4096,
        minimum=257,
    )
    train_bytes: int = key(
        "size of the sample of the corpus that the BPE is trained on",
        unit="bytes",
        default=8_000_000,
        minimum=1,
    )
    file: str | None = key(
        "path of a tokenizer.json to use instead of training one", default=None, is_path=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Table):
    """How the job is spread over processes; their number is pp * dp * ep."""

    table: ClassVar[str] = "parallel"
    pp: int = key("pipeline stages", unit="ranks", default=1, minimum=1)
    dp: int = key("data-parallel replicas of the experts", unit="ranks", default=1, minimum=1)
    ep: int = key(
        "ranks that share the experts of a layer, each with tokens of its own",
        unit="ranks",
        default=1,
        minimum=1,
    )
    schedule: Literal["1f1b", "forward_then_backward"] = key(
        "order in which a pipeline stage runs its microbatches", default="1f1b"
    )
    timeout_s: float = key(
        "longest wait of a rank for another one before the job fails",
        unit="seconds",
        default=120.0,
        above=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Table):
    """How long, on what and with which batches the job trains."""

    table: ClassVar[str] = "train"
    output_dir: str = key("folder for checkpoints, metrics and plots", is_path=True)
    seed: int = key("seed of the weights and of the order of the data", default=0, minimum=0)
    max_steps: int = key("optimizer steps of the whole run", unit="steps", minimum=1)
    global_batch_size: int = key(
        "sequences of one optimizer step, over all ranks", unit="sequences", minimum=1
    )
    gradient_accumulation_steps: int = key(
        "global microbatches that one optimizer step is cut into (those of the pipeline)",
        unit="microbatches",
        default=1,
        minimum=1,
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "number format of parameters and activations", default="float32"
    )
    master_weights: bool = key(
        "keep float32 copies of bfloat16 parameters in the optimizer", default=False
    )
    gradient_accumulation_fusion: bool = key(
        "from the second microbatch on add weight gradients in place, to save time and memory",
        default=False,
    )
    recompute: Literal["layers"] | None = key(
        "what the backward computes again instead of keeping it, with the same routing",
        default=None,
    )
    loss_chunk_tokens: int | None = key(
        "logits are computed for this many tokens at a time, to save memory; absent: for all",
        unit="tokens",
        default=None,
        minimum=1,
    )
    mtp_loss_coef: float = key(
        "factor of the loss of the multi-token prediction layers (num_nextn_predict_layers of "
        "config.json); with 0 they are not trained",
        default=0.3,
        minimum=0,
    )
    validation_interval_steps: int = key(
        "steps between validations; the end of the run is always validated",
        unit="steps",
        default=50,
        minimum=1,
    )
    validation_sequences: int = key(
        "sequences of the held-out text that one validation reads",
        unit="sequences",
        default=64,
        minimum=1,
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "where to train; auto takes CUDA when there is a device for each local rank", default="auto"
    )
    threads_per_rank: int | None = key(
        "CPU threads of each rank; absent: the machine's cores divided by its ranks",
        unit="threads",
        default=None,
        minimum=1,
    )

    def _check(self) -> None:
        if self.master_weights and self.dtype == "float32":
            raise TrainValueError(
                'train.master_weights=true has no use with train.dtype="float32"; '
                'set train.dtype="bfloat16" or leave master_weights out'
            )
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise TrainValueError(_batch_message(self, "", self.gradient_accumulation_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Table):
    """AdamW with warm-up, decay of the learning rate, and clipping by the global norm."""

    table: ClassVar[str] = "optimizer"
    lr: float = key("peak learning rate", above=0)
    min_lr_ratio: float = key(
        "learning rate at the end of the decay",
        unit="fraction of lr",
        default=0.1,
        minimum=0,
        maximum=1,
    )
    warmup_steps: int = key(
        "steps in which the learning rate rises from 0 to lr", unit="steps", default=0, minimum=0
    )
    decay: Literal["cosine", "linear", "constant"] = key(
        "shape of the learning rate after the warm-up", default="cosine"
    )
    weight_decay: float = key("decoupled weight decay", default=0.1, minimum=0)
    beta1: float = key("decay of the mean of gradients", default=0.9, minimum=0, maximum=0.999999)
    beta2: float = key(
        "decay of the mean of squared gradients", default=0.95, minimum=0, maximum=0.9999999
    )
    eps: float = key("added to the root of the second moment", default=1e-8, above=0)
    max_grad_norm: float = key(
        "gradients are scaled down to this global norm; inf for no limit",
        default=1.0,
        above=0,
        maximum=math.inf,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Table):
    """When checkpoints are written and how many are kept."""

    table: ClassVar[str] = "checkpoint"
    interval_steps: int | None = key(
        "steps between checkpoints; absent: only at the end, or when the job is stopped",
        unit="steps",
        default=None,
        minimum=1,
    )
    save_total_limit: int = key(
        "newest checkpoints to keep", unit="checkpoints", default=2, minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Table):
    """What is reported, where and how often."""

    table: ClassVar[str] = "log"
    interval_steps: int = key(
        "steps between lines of metrics.jsonl", unit="steps", default=1, minimum=1
    )
    tensorboard: bool = key("also write TensorBoard event files", default=True)
    plots: bool = key("write loss.png and expert_load.png at the end", default=True)
    progress: Literal["auto", "live", "plain", "off"] = key(
        "how progress is shown; auto is live on a terminal and plain lines elsewhere",
        default="auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole training job, one attribute for each table of the TOML file.

    Raises:
        TypeError: an attribute is another table, or none.
        ValueError: values that contradict each other; the message gives the numbers and a
            remedy.
    """

    model: ModelConfig
    moe: MoeTable = field(default_factory=MoeTable)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name, table_type in TABLES.items():
            check_type(f"Config({name}=...)", getattr(self, name), table_type)
        ranks = self.parallel.dp * self.parallel.ep
        divisor = self.train.gradient_accumulation_steps * ranks
        if self.train.global_batch_size % divisor:
            layout = f" * parallel.dp={self.parallel.dp} * parallel.ep={self.parallel.ep}"
            raise TrainValueError(_batch_message(self.train, layout, divisor))

    @property
    def world_size(self) -> int:
        """Number of processes: pp * dp * ep."""
        return self.parallel.pp * self.parallel.dp * self.parallel.ep


TABLES: dict[str, type[Table]] = {
    table.table: table
    for table in (
        ModelConfig,
        MoeTable,
        DataConfig,
        TokenizerConfig,
        ParallelConfig,
        TrainConfig,
        OptimizerConfig,
        CheckpointConfig,
        LogConfig,
    )
}
"""The tables of the file, by name, in the order in which they are written."""


def all_keys() -> Iterable[KeyInfo]:
    """Every key of every table, in order."""
    for table in TABLES.values():
        yield from keys_of(table)


def _batch_message(train: TrainConfig, layout: str, divisor: int) -> str:
    batch, below = train.global_batch_size, train.global_batch_size // divisor * divisor
    choices = f"{below} or {below + divisor}" if below else f"{divisor}"
    return (
        f"train.global_batch_size={batch} does not divide by train.gradient_accumulation_steps="
        f"{train.gradient_accumulation_steps}{layout} = {divisor}; choose {choices}"
    )
