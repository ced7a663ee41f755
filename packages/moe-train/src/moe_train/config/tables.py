"""The configuration of a training job: one frozen dataclass for each table of the TOML file.

A `Config` is plain data, made once and never changed; whatever can be checked without the model or
the corpus is checked when it is made. Every field carries its help text and unit, from which
`moe-train train --help` and the messages are made. Files are read by `moe_train.config.toml_file`.

    config = load_config(Path("examples/python_stdlib.toml"), ["train.max_steps=50"])
    config.parallel.pp, config.world_size
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_train.config.data_tables import DataConfig, SourceConfig, TokenizerConfig
from moe_train.config.keys import KeyInfo, Table, keys_of
from moe_train.config.model_tables import ModelConfig, MoeTable
from moe_train.config.optimizer_tables import OptimizerConfig, ParamGroupConfig
from moe_train.config.parallel_table import ParallelConfig
from moe_train.config.run_tables import CheckpointConfig, LogConfig, MemoryConfig
from moe_train.config.train_tables import TrainConfig, batch_message
from moe_train.errors import TrainValueError, check_type


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
    sources: tuple[SourceConfig, ...] = ()
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    param_groups: tuple[ParamGroupConfig, ...] = ()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        for name, table_type in TABLES.items():
            check_type(f"Config({name}=...)", getattr(self, name), table_type)
        self._check_sources()
        if self.model.experts_fp8 and self.train.dtype != "bfloat16":
            raise TrainValueError(
                "model.experts_fp8=true rounds bfloat16 rows and weights, not those of "
                f'train.dtype="{self.train.dtype}"; set train.dtype="bfloat16"'
            )
        if self.train.stochastic_rounding and "muon" in (
            self.optimizer.name,
            *(group.algorithm for group in self.param_groups),
        ):
            raise TrainValueError(
                "train.stochastic_rounding=true is for AdamW, and muon updates some parameters; "
                "use train.master_weights=true, or AdamW alone"
            )
        self._check_tensor_parallel()
        if self.parallel.overlap_grad_reduce and self.train.gradient_accumulation_fusion:
            raise TrainValueError(
                "train.gradient_accumulation_fusion=true adds gradients where nobody sees them "
                "come, which parallel.overlap_grad_reduce=true waits for; take one of them out"
            )
        if self.parallel.sharding > 2 and self.train.offload_activations:
            raise TrainValueError(
                "train.offload_activations=true cannot tell parameters that come and go, as with "
                "parallel.sharding=3, from activations; use parallel.sharding=2, or take it out"
            )
        if self.parallel.relayout and self.checkpoint.node_folder is not None:
            raise TrainValueError(
                "the layout cannot change with checkpoint.node_folder, which keeps the state in "
                "one layout; take it out, or keep the layout"
            )
        if "://" in self.train.output_dir and self.log.dir is None:
            raise TrainValueError(
                f"train.output_dir is a {self.train.output_dir.partition(':')[0]}:// URL, where "
                "checkpoints can lie, but no metrics, plots or lock; set log.dir to a directory"
            )

    @property
    def log_folder(self) -> Path:
        """Where metrics, plots, `run.json` and the lock of the run lie."""
        return Path(self.log.dir or self.train.output_dir)

    @property
    def local_folders(self) -> dict[str, Path]:
        """The directories that the run writes to, by the key that names each."""
        keys = {
            "train.output_dir": self.train.output_dir,
            "log.dir": self.log.dir,
            "moe.record_routing": self.moe.record_routing,
        }
        return {name: Path(text) for name, text in keys.items() if text and "://" not in text}

    def check_batch(self) -> None:
        """Whether each rank, or each cp * tp ranks, get as many sequences of every microbatch.

        The sizes of the model are asked first: an `ep` that cannot share the experts is no matter
        of the batch.

        Raises:
            ValueError: it does not; with the nearest batches that fit.
        """
        parallel = self.parallel
        divisor = self.train.gradient_accumulation_steps * parallel.num_sample_ranks
        if self.train.global_batch_size % divisor:
            layout = f" * parallel.dp={parallel.dp} * parallel.ep={parallel.ep}"
            shared = {"cp": parallel.cp, "tp": parallel.tp}
            layout += "".join(f" / parallel.{n}={size}" for n, size in shared.items() if size > 1)
            raise TrainValueError(batch_message(self.train, layout, divisor))

    @property
    def world_size(self) -> int:
        """Number of processes: pp * dp * ep."""
        return self.parallel.world_size

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Every source with all its keys set; without [sources.NAME] one, "data", of [data]."""
        named = self.sources or (SourceConfig(name="data", corpus=self.data.corpus),)
        return tuple(source.filled(self.data) for source in named)

    @property
    def tables(self) -> Iterator[Table]:
        """Every table of the job, in the order of the file; those with a NAME come last."""
        yield from (getattr(self, table) for table in TABLES)
        yield from (table for name in NAMED_TABLES for table in getattr(self, name))

    def with_keys(self, keys: Mapping[str, object]) -> "Config":
        """The job with other values of keys; keys of one table are checked together.

        Args:
            keys: full name, such as "parallel.pp", -> value.

        Raises:
            ValueError: a value is out of range, or contradicts others.
        """
        values: dict[str, dict[str, Any]] = {}
        for full_name, value in keys.items():
            table, _, name = full_name.partition(".")
            values.setdefault(table, {})[name] = value
        changed: dict[str, Any] = {
            table: replace(getattr(self, table), **own) for table, own in values.items()
        }
        return replace(self, **changed)

    def _check_tensor_parallel(self) -> None:
        muon = [
            group.place + ".algorithm" for group in self.param_groups if group.algorithm == "muon"
        ]
        if self.optimizer.name == "muon":
            muon.append("optimizer.name")
        for layout in self.parallel.layouts:
            if layout.tp > 1 and self.moe.shared_expert_overlap:
                raise TrainValueError(
                    f"parallel.tp={layout.tp} ranks gather tokens for the shared expert, which "
                    "moe.shared_expert_overlap=true runs while others travel; take one of them out"
                )
            for name, size, other in (("tp", layout.tp, "cp"), ("etp", layout.etp, "ep")):
                if size > 1 and muon:
                    raise TrainValueError(
                        f"parallel.{name}={size} cuts matrices among ranks, and muon needs whole "
                        f'ones; use {muon[0]}="adamw", or parallel.{other} instead of {name}'
                    )
            self._check_etp(layout.etp)

    def _check_etp(self, etp: int) -> None:
        if etp > 1 and self.train.stochastic_rounding:
            raise TrainValueError(
                f"parallel.etp={etp} cuts each expert in two dims, and train.stochastic_rounding="
                "true draws for its rows; use train.master_weights=true, or parallel.ep instead"
            )
        if etp > 1 and self.model.experts_fp8:
            raise TrainValueError(
                f"parallel.etp={etp} shares out the inner width of experts, over which "
                "model.experts_fp8=true scales rows; use parallel.ep instead of etp"
            )

    def _check_sources(self) -> None:
        for place, table_type in NAMED_TABLES.items():
            named = getattr(self, place)
            check_type(f"Config({place}=...)", named, tuple)
            for table in named:
                check_type(f"Config({place}=...)", table, table_type)
            names = [table.name for table in named]
            if len(set(names)) < len(names):
                raise TrainValueError(
                    f"{place} {', '.join(names)} have names that are not distinct"
                )
        if self.sources and self.data.corpus != DataConfig().corpus:
            raise TrainValueError(CORPUS_TWICE)
        _ = self.all_sources  # checks what their keys and those of [data] say together


CORPUS_TWICE = (
    "data.corpus and [sources.NAME] are both given; take data.corpus out, or move it into a table "
    "[sources.NAME] of its own"
)
"""The message for a job that says twice what it trains on."""

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
        MemoryConfig,
    )
}
"""The tables of the file, by name, in the order in which they are written."""


NAMED_TABLES: dict[str, type[SourceConfig | ParamGroupConfig]] = {
    "sources": SourceConfig,
    "param_groups": ParamGroupConfig,
}
"""The tables of which a job has as many as it likes, `[sources.NAME]`; attributes of `Config`."""


def all_keys() -> Iterable[KeyInfo]:
    """Every key of every table that has no NAME, in order."""
    for table in TABLES.values():
        yield from keys_of(table)
