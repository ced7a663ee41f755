"""A decoder without its training: loaded once, each rank its own part, and run forwards.

Ranks with other tokens (dp x ep) hold other rows of a batch, also none; a pipeline's stages pass
hidden states on. Every call is made by all ranks of the layout together.

    model = open_model(Path("checkpoint-250"), ModelOptions(), None)     # alone in this process
    hidden_BSd = model.forward(input_ids_BS, position_ids_BS, cache)    # None before the last stage
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from comm_collectives import all_reduce, broadcast, recv, send
from moe_train.config import ParallelConfig
from moe_train.errors import MissingFileError, TrainValueError, check_type
from moe_train.layout import (
    parameter_layouts,
    read_decoder,
    single_rank_layouts,
    stage_tensors,
    stored_tensors,
)
from moe_train.model import DecoderConfig, DecoderStage, KeyValueCache, StageOptions, stage_layers
from moe_train.parallel import Parallel, choose_device
from unified_ckpt import CheckpointError, load
from unified_ckpt.files.storage import Location

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Where a model runs, and in which numbers.

    Attributes:
        device: "auto", "cpu" or "cuda".
        dtype: of weights and activations; None: that of the checkpoint.
        parallel: the layout; one process by default.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise TrainValueError(f"dtype={self.dtype!r}; choose one of {', '.join(_DTYPES)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise TrainValueError(f"device={self.device!r}; choose auto, cpu or cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """This rank's part of a decoder in evaluation mode, and the ranks that have the others.

    Attributes:
        stage: the layers of this rank.
        parallel: where this rank stands; None: alone.
        timeout_s: limit of each wait for another rank.
    """

    stage: DecoderStage
    parallel: Parallel | None
    device: torch.device
    timeout_s: float

    @property
    def config(self) -> DecoderConfig:
        """What the decoder is made of."""
        return self.stage.config

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.stage.options.last

    @property
    def data_rank(self) -> int:
        """The number of this rank among those that hold other rows."""
        return 0 if self.parallel is None else self.parallel.data_rank

    @property
    def num_data_ranks(self) -> int:
        """Among how many ranks rows are divided."""
        return 1 if self.parallel is None else self.parallel.num_data_ranks

    @property
    def is_writer(self) -> bool:
        """Whether this rank, one of all, has results to show."""
        return self.is_last and self.data_rank == 0

    @property
    def writer_rank(self) -> int:
        """The rank with `is_writer`."""
        if self.parallel is None:
            return 0
        last = self.parallel.num_stages - 1
        return self.parallel.mesh.rank_at(pp=last, dp=0, ep=0)

    @torch.no_grad()
    def forward(
        self, input_ids_BS: Tensor, position_ids_BS: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor | None:
        """The hidden states [B, S, d] of this rank's rows. Collective.

        Args:
            input_ids_BS: int64; the same on every stage, B may be 0.
            position_ids_BS: int64, -1 for padding.
            cache: of the tokens so far.

        Returns:
            Those of the last layer, before the norm; None where it is not on this rank.
        """
        positions = position_ids_BS.to(self.device)
        pipe, stage, limit = self._pipe
        if self.stage.options.first:
            inputs = input_ids_BS.to(self.device)
        else:
            inputs = recv(src=stage - 1, group=pipe, device=self.device, timeout_s=limit)
        hidden_BSd, _ = self.stage.hidden_states(inputs, positions, cache)
        if self.is_last:
            return hidden_BSd
        send(hidden_BSd, dst=stage + 1, group=pipe, timeout_s=limit)
        return None

    def tell_stages(self, values: Tensor | None) -> Tensor:
        """What the last stage says to the other stages of its rows. Collective over those.

        Args:
            values: int64 on the CPU; None on the other stages.
        """
        if self.parallel is None or self.parallel.num_stages == 1:
            if values is None:
                raise TrainValueError("the last stage gives values to tell")
            return values
        last = self.parallel.num_stages - 1
        pipe, _, limit = self._pipe
        return broadcast(values, src=last, group=pipe, device="cpu", timeout_s=limit)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in fp64. Collective."""
        if self.parallel is None:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(v) for v in all_reduce(own, timeout_s=self.timeout_s).tolist()]

    @property
    def _pipe(self) -> "tuple[torch.distributed.ProcessGroup | None, int, float]":
        if self.parallel is None:
            return None, 0, self.timeout_s
        return self.parallel.forward_group, self.parallel.stage, self.timeout_s


def open_model(
    checkpoint: Path,
    options: ModelOptions,
    parallel: Parallel | None,
    weights: Path | Location | None = None,
) -> ModelRanks:
    """Load this rank's part of a transformers checkpoint of a known family.

    Layers for multi-token prediction are left out. Not collective.

    Args:
        checkpoint: its folder.
        options: where the model runs.
        parallel: this rank's place; None alone.
        weights: the checkpoint that holds the weights, where that is another place.

    Raises:
        ValueError: the folder cannot be used; the message names it, the reason and a remedy.
    """
    config = check_model(checkpoint, options.parallel).with_mtp_layers(0)
    device = choose_device(options.device) if parallel is None else parallel.device
    dtype = _DTYPES[options.dtype] if options.dtype else stored_dtype(config, checkpoint)
    stage_options = StageOptions(
        layers=stage_layers(
            config.num_hidden_layers,
            options.parallel.pp,
            0 if parallel is None else parallel.stage,
        ),
        first=parallel is None or parallel.is_first,
        last=parallel is None or parallel.is_last,
        ep_group=parallel.ep_group if parallel and options.parallel.ep > 1 else None,
        token_group=parallel.data_group if parallel and parallel.num_data_ranks > 1 else None,
        device=device,
        dtype=dtype,
    )
    stage = DecoderStage(config, stage_options)
    _fill(stage, weights or checkpoint, parallel)
    return ModelRanks(
        stage=stage.eval(),
        parallel=parallel,
        device=device,
        timeout_s=options.parallel.timeout_s,
    )


def load_model(checkpoint: Path, device: torch.device | None = None) -> DecoderStage:
    """The whole decoder on this device, with the weights of `checkpoint`, in their dtype.

    Raises:
        ValueError: the folder is not a checkpoint of a known family, a file is missing or damaged,
            or a tensor does not fit; the message names it.
    """
    check_type("checkpoint", checkpoint, Path)
    config = check_model(checkpoint, ParallelConfig())
    layers = range(config.num_hidden_layers)
    dtype = stored_dtype(config, checkpoint)
    options = StageOptions(layers=layers, first=True, last=True, device=device, dtype=dtype)
    stage = DecoderStage(config, options)
    _fill(stage, checkpoint, None)
    return stage.eval()


def check_model(checkpoint: Path, parallel: ParallelConfig) -> DecoderConfig:
    """The decoder of a checkpoint's folder, whose weights are not read.

    Raises:
        ValueError: there is no such folder, no `config.json` that can be used, or layers or experts
            do not divide by the ranks of the layout.
    """
    if not checkpoint.is_dir():
        raise MissingFileError(f"{checkpoint} is not a folder; name a checkpoint-N folder")
    if not (checkpoint / "config.json").is_file():
        raise MissingFileError(
            f"{checkpoint} holds no config.json; name a checkpoint-N folder, or a folder that "
            "save_pretrained of transformers has written"
        )
    config = read_decoder(checkpoint)
    parallel.check_divides(
        num_hidden_layers=config.num_hidden_layers, num_experts=config.num_experts
    )
    return config


def stored_dtype(config: DecoderConfig, checkpoint: Path) -> torch.dtype:
    """The dtype that `config.json` names; float32 where it names none."""
    name = config.extra.get("dtype", config.extra.get("torch_dtype")) or "float32"
    if name not in _DTYPES:
        raise TrainValueError(
            f"{checkpoint / 'config.json'}: dtype={name!r}; choose one of {', '.join(_DTYPES)} by "
            "--dtype"
        )
    return _DTYPES[name]


def _fill(stage: DecoderStage, checkpoint: Path | Location, parallel: Parallel | None) -> None:
    """Read this rank's weights."""
    if parallel is None:
        layouts, rank = single_rank_layouts(stage, stage.config), 0
    else:
        layouts = parameter_layouts(stage, stage.config, parallel.stage_mesh)
        rank = parallel.rank
    stored = stored_tensors(layouts, stage_tensors(stage), rank=rank)
    try:
        load(stored.shards, checkpoint_id=checkpoint, part="model", cast=True)
    except CheckpointError as error:
        raise TrainValueError(
            f"{checkpoint} cannot be loaded: {error}. Name another checkpoint, or copy this one "
            "again from where it is whole"
        ) from error
    stored.write_back()
