import pytest
import torch

from moe_train.model import EMBEDDING, DecoderConfig, DecoderStage, StageOptions
from moe_train.training.pipelines.rank_stages import RankStages

SIZES = {
    "model_type": "mixtral",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
CPU = torch.device("cpu")


def ends_of(tied: bool) -> RankStages:
    """The first and the last of four stages."""
    config = DecoderConfig.from_dict(SIZES | {"tie_word_embeddings": tied})
    stages = {
        number: DecoderStage(
            config,
            StageOptions(
                layers=range(number, number + 1), first=number == 0, last=number == 3, device=CPU
            ),
        )
        for number in (0, 3)
    }
    return RankStages(config, stages)


@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_the_whole_decoder_and_each_parameter_has_one(tied: bool) -> None:
    stages = ends_of(tied)
    options = StageOptions(layers=range(4), first=True, last=True, device=torch.device("meta"))
    whole = DecoderStage(stages.config, options)
    wanted = {n for n in whole.state_dict() if ".layers.1." not in n and ".layers.2." not in n}
    assert set(stages.state_dict()) == wanted
    held = dict(stages.named_parameters(remove_duplicate=False))
    assert len({id(p) for p in held.values()}) == len(held)
    ours = {id(p) for stage in stages.by_number.values() for p in stage.parameters()}
    assert ours == {id(p) for p in held.values()}
    if tied:
        assert stages.by_number[3].head is held[EMBEDDING]


def test_modes_and_records_go_through_to_every_stage() -> None:
    stages = ends_of(tied=False)
    stages.eval()
    assert not any(stage.training for stage in stages.by_number.values())
    stages.train()
    assert all(stage.training for stage in stages.by_number.values())
    for number, stage in stages.by_number.items():
        stage.record.aux_loss += 1.0 + number
        stage.record.load_E[number] = torch.full((4,), number)
    record = stages.take_record()
    assert record.aux_loss == 5.0 and set(record.load_E) == {0, 3}
    assert stages.take_record().aux_loss == 0.0
