"""The pipeline stages of one rank as one module, whose names are those of the whole decoder.

A rank may hold several stages that do not follow each other. For optimizer and checkpoint they are
one module with one set of names; the executor drives each alone. Where the first and the last stage
lie on one rank and both use the embedding, it is one parameter.

    stages = RankStages(config, {0: first, 3: last})
    executor = PipelineExecutor(stages.by_number, schedule, rank=0)
"""

from collections.abc import Mapping
from typing import Self

from torch import nn

from moe_train.model import DecoderConfig, DecoderStage, StageRecord


class RankStages(nn.Module):
    """See the module's docstring; called only through `by_number`.

    Args:
        config: of the whole decoder.
        stages: by number, in the order of the layers.
    """

    def __init__(self, config: DecoderConfig, stages: Mapping[int, DecoderStage]) -> None:
        super().__init__()
        self.config = config
        # In a plain dict, so that parameters have one name and not one more for each stage.
        self.by_number: dict[int, DecoderStage] = dict(stages)
        self.model = nn.Module()
        layers: dict[str, nn.Module] = {}
        for stage in stages.values():
            layers.update(stage.model.layers.named_children())
            for owner, part in ((self.model, stage.model), (self, stage)):
                for name, module in part.named_children():
                    if name in ("model", "layers"):
                        continue
                    if name in dict(owner.named_children()):
                        part.register_module(name, owner.get_submodule(name))
                    else:
                        owner.register_module(name, module)
        self.model.layers = nn.ModuleDict(layers)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of every stage."""
        for stage in self.by_number.values():
            stage.train(mode)
        return super().train(mode)

    def begin_step(self, step: int) -> None:
        """Number the tokens of the microbatches that follow as those of this step of training."""
        for stage in self.by_number.values():
            stage.begin_step(step)

    def take_record(self) -> StageRecord:
        """Return the sums of all stages since the last call and start new ones."""
        total, *others = (stage.take_record() for stage in self.by_number.values())
        for record in others:
            total.loss += record.loss
            total.aux_loss += record.aux_loss
            total.z_loss += record.z_loss
            total.mtp_loss += record.mtp_loss
            total.load_E |= record.load_E
        return total
