"""Which experts the tokens of each step chose, kept in files, and chosen again by another run.

Rounding decides near-ties, so two programs that compute the same (another layout, another format
of numbers, another kernel) soon send tokens to other experts. A run with `moe.replay_routing` takes
the choices of one with `moe.record_routing`; its routers compute their own weights and losses.

A step has a folder `step-00000012`, to which every rank that has MoE layers gives one file: for
each layer int16 [sequences, tokens, choices], -1: none. Sequences are known by their sample
numbers, and samples, positions and layers have the same numbers in every layout, so a replay may
run in another one. Bytes of a step: 2 * choices * layers * tokens.

Invariant: a step is replayed whole, from choices of the same samples, or it is an error.

    files = RoutingFiles.of(config, data, parallel)
    with files.step(12, stages, plan.samples(first_sample)):
        runner.train(...)
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_pipeline import MoELayer
from moe_pipeline.layer import record_routing, replay_routing
from moe_train.config import Config
from moe_train.data import DataIdentity
from moe_train.errors import TrainValueError
from moe_train.model.parallel import WHOLE, PositionCut
from moe_train.parallel import Parallel

Samples = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingFiles:
    """What one rank writes of each step, and reads for it; see the module's docstring.

    Args:
        record: folder to write to, the same for all ranks; None: nothing is written.
        replay: folder to read from; None: tokens choose for themselves.
        data: what the sample numbers mean.
        rank: of the job; the first one begins the folder of a step.
        length: tokens of a sequence.
        cut: which of its sequences' positions the rank has.
    """

    record: Path | None
    replay: Path | None
    data: str
    rank: int
    length: int
    cut: PositionCut = WHOLE

    @staticmethod
    def of(config: Config, data: DataIdentity, parallel: Parallel) -> "RoutingFiles":
        """Those of a job."""
        record, replay = config.moe.record_routing, config.moe.replay_routing
        return RoutingFiles(
            record=None if record is None else Path(record),
            replay=None if replay is None else Path(replay),
            data=json.dumps(asdict(data), sort_keys=True),
            rank=parallel.rank,
            cut=parallel.cut,
            length=data.sequence_length,
        )

    @contextmanager
    def step(self, step: int, stages: nn.Module, samples: Samples) -> Iterator[None]:
        """Record and replay the step's choices, as far as the job asks for it.

        The forward of the microbatches has to run in here, in their order, and has to end with
        something that waits for every rank. Not collective by itself.

        Args:
            step: number of the step.
            samples: sample numbers of this rank's sequences, one array for each microbatch.

        Raises:
            ValueError: the record lacks the step or some of its samples, is of other data, or does
                not fit the layers.
        """
        has_experts = any(isinstance(module, MoELayer) for module in stages.modules())
        if self.record is not None and self.rank == 0:
            # Of a run that was ended behind this step; other ranks write when all have computed.
            shutil.rmtree(_folder(self.record, step), ignore_errors=True)
        if not has_experts or (self.record is None and self.replay is None):
            yield
            return
        if self.replay is None:
            with record_routing(stages) as choices:
                yield
        else:
            given = self._read(step, stages, samples)
            with replay_routing(stages, given), record_routing(stages) as choices:
                yield
        if self.record is not None:
            self._write(_folder(self.record, step), choices, samples)

    def _write(self, folder: Path, choices: dict[str, Tensor], samples: Samples) -> None:
        """One file, which has its name when it is whole."""
        order, lengths = np.concatenate(samples), self.cut.lengths(self.length)
        tensors = {}
        for layer in sorted({key.rpartition(".")[0] for key in choices}):
            calls = [
                choices[f"{layer}.{number}"]
                .cpu()
                .view(len(part), lengths[self.cut.rank], choices[f"{layer}.0"].shape[1])
                for number, part in enumerate(samples)
            ]
            tensors[layer] = torch.cat(calls).to(torch.int16)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank:05d}.safetensors"
        runs = [[run.start, run.stop] for run in self.cut.spans(self.length)[self.cut.rank]]
        of_rows = {"samples": json.dumps(order.tolist()), "positions": json.dumps(runs)}
        told = {**of_rows, "data": self.data}
        save_file(tensors, path.with_suffix(".part"), metadata=told)
        path.with_suffix(".part").replace(path)

    def _read(self, step: int, stages: nn.Module, samples: Samples) -> dict[str, Tensor]:
        """The choices of this rank's layers and samples, call by call."""
        replay = self.replay
        if replay is None:
            return {}
        layers = [name for name, each in stages.named_modules() if isinstance(each, MoELayer)]
        folder = _folder(replay, step)
        paths = sorted(folder.glob("rank-*.safetensors"))
        if not paths:
            raise TrainValueError(
                f"moe.replay_routing={replay} has no record of step {step}; end with "
                "train.max_steps where the record ends, or name another record"
            )
        wanted = {int(sample) for part in samples for sample in part}
        found: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)
        for path in paths:
            for place, parts in self._rows(path, layers, wanted):
                found[place] |= parts
        missing = sorted(
            {
                s
                for layer in layers
                for s in wanted
                if sum(map(len, found[layer, s].values())) != self.length
            }
        )
        if missing:
            raise TrainValueError(
                f"{folder} lacks the choices of some layer for samples {missing[:8]}, "
                f"{len(missing)} in all; give every machine the files of all ranks, and the same "
                "train.global_batch_size"
            )
        return {
            f"{layer}.{number}": torch.cat(
                [self._own(found[layer, int(sample)]) for sample in part]
            ).long()
            for layer in layers
            for number, part in enumerate(samples)
        }

    def _own(self, parts: Mapping[int, Tensor]) -> Tensor:
        """This rank's tokens of a sequence, from its parts by their first positions."""
        whole = torch.cat([row for _, row in sorted(parts.items())])
        return self.cut.take(whole[None])[0]

    def _rows(
        self, path: Path, layers: Sequence[str], wanted: set[int]
    ) -> list[tuple[tuple[str, int], dict[int, Tensor]]]:
        """What a file has of layers and samples: by first position int16 [tokens, choices]."""
        try:
            with safe_open(path, framework="pt") as file:
                told = file.metadata() or {}
                if told.get("data") != self.data:
                    raise TrainValueError(
                        f"{path} is of other data than this job's, or of another data.sequence_"
                        "length or train.seed, so its samples are others; replay the data that "
                        "was recorded"
                    )
                rows = [
                    (row, s) for row, s in enumerate(json.loads(told["samples"])) if s in wanted
                ]
                stored = set(file.keys()) if rows else set()
                slices = {layer: file.get_slice(layer) for layer in layers if layer in stored}
                runs = json.loads(told.get("positions", f"[[0, {self.length}]]"))
                sizes = [end - start for start, end in runs]
                firsts = [start for start, _ in runs]
                return [
                    ((name, sample), dict(zip(firsts, part[row].split(sizes), strict=True)))
                    for name, part in slices.items()
                    for row, sample in rows
                ]
        except (OSError, SafetensorError) as error:
            raise TrainValueError(f"cannot read the record {path}: {error}") from error


def _folder(record: Path, step: int) -> Path:
    return record / f"step-{step:08d}"
