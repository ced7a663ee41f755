import itertools

import pytest
import torch

from moe_train.layout import single_rank_layouts, stored_shards
from moe_train.model.config import Qwen3MoeConfig
from moe_train.model.init import initialise
from moe_train.model.stage import DecoderStage, StageOptions, Target, stage_layers


def config_of(**changes: object) -> Qwen3MoeConfig:
    values: dict[str, object] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "intermediate_size": 24,
        "mlp_only_layers": (1,),
    }
    return Qwen3MoeConfig(**{**values, **changes})  # type: ignore[arg-type]


def make_stage(config: Qwen3MoeConfig, layers: range, **options: object) -> DecoderStage:
    last = layers.stop == config.num_hidden_layers
    stage = DecoderStage(
        config,
        StageOptions(
            layers=layers,
            first=layers.start == 0,
            last=last,
            aux_loss_coef=0.1,
            **options,  # type: ignore[arg-type]
        ),
    )
    layouts = single_rank_layouts(stage, config)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            for shard in stored_shards(layouts[name], parameter.data, 0, ""):
                initialise(shard.key, shard.tensor, seed=5, std=0.3)
    return stage


def batch(config: Qwen3MoeConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocab_size, (3, 11))
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    return tokens[:, :-1], labels, torch.arange(10).expand(3, 10)


def test_stages_in_a_row_equal_one_stage_in_loss_and_gradients() -> None:
    config = config_of()
    tokens, labels, positions = batch(config)
    whole = make_stage(config, range(4))
    loss = whole(tokens, positions, target=Target(labels, 0.1)).loss
    loss.backward()
    first, second = make_stage(config, range(0, 2)), make_stage(config, range(2, 4))
    middle = first(tokens, positions)
    total = second(*middle.tensors, target=Target(labels, 0.1)).loss + middle.loss
    total.backward()
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=1e-6)
    expected = dict(whole.named_parameters())
    parts = dict(itertools.chain(first.named_parameters(), second.named_parameters()))
    assert parts.keys() == expected.keys()
    for name, parameter in parts.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-6)


def test_ignored_labels_do_not_count() -> None:
    config = config_of()
    tokens, labels, positions = batch(config)
    stage = make_stage(config, range(4)).eval()
    with torch.no_grad():
        everything = stage(tokens, positions, target=Target(labels, 1.0)).loss
        alone = torch.full_like(labels, -100)
        parts = []
        for row in range(3):
            some = alone.clone()
            some[row] = labels[row]
            parts.append(stage(tokens, positions, target=Target(some, 1.0)).loss)
        assert stage(tokens, positions, target=Target(alone, 1.0)).loss == 0
    torch.testing.assert_close(sum(parts), everything)


def test_the_record_sums_the_microbatches_and_is_taken_once() -> None:
    config = config_of()
    tokens, labels, positions = batch(config)
    stage = make_stage(config, range(4), num_microbatches=2)
    for _ in range(2):
        stage(tokens, positions, target=Target(labels, 0.5))
    record = stage.take_record()
    assert sorted(record.load_E) == [0, 2, 3]
    for load_E in record.load_E.values():
        assert int(load_E.sum()) == 2 * 30 * 2
    assert record.aux_loss > 0 and record.loss > 0
    assert stage.take_record().load_E == {}


def test_evaluation_has_no_auxiliary_loss() -> None:
    config = config_of()
    tokens, _, positions = batch(config)
    stage = make_stage(config, range(0, 2))
    assert stage(tokens, positions).loss is not None
    assert stage.eval()(tokens, positions).loss is None


def test_tied_embeddings_share_the_head_and_refuse_to_be_split() -> None:
    config = config_of(tie_word_embeddings=True)
    stage = make_stage(config, range(4))
    assert "lm_head.weight" not in dict(stage.named_parameters())
    hidden = torch.randn(1, 2, 16)
    expected = stage.model.norm(hidden) @ stage.model.embed_tokens.weight.T
    torch.testing.assert_close(stage.logits(hidden), expected)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        make_stage(config, range(0, 2))


def test_the_last_stage_names_a_missing_target() -> None:
    config = config_of()
    tokens, _, positions = batch(config)
    with pytest.raises(TypeError, match="Target"):
        make_stage(config, range(4))(tokens, positions)


def test_layers_that_do_not_divide_are_refused_with_the_choices() -> None:
    assert [list(stage_layers(6, 3, s)) for s in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"num_hidden_layers=6 .*pp=4.*1, 2, 3, 6"):
        stage_layers(6, 4, 0)
