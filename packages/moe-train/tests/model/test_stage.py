import itertools

import pytest
import torch

from moe_train.layout.parameters import single_rank_layouts, stage_tensors, stored_tensors
from moe_train.model.config import DecoderConfig
from moe_train.model.init import initialise
from moe_train.model.layer_recompute import Form
from moe_train.model.stage import EMBEDDING, DecoderStage, StageOptions, Target


def config_of(**changes: object) -> DecoderConfig:
    values: dict[str, object] = {
        "model_type": "qwen3_moe",
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
    return DecoderConfig.from_dict({**values, **changes})


def make_stage(config: DecoderConfig, layers: range, **options: object) -> DecoderStage:
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
    stored = stored_tensors(single_rank_layouts(stage, config), stage_tensors(stage), 0)
    for shard in stored.shards:
        initialise(shard.key, shard.tensor, seed=5, std=0.3)
    stored.write_back()
    return stage


def batch(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def test_tied_embeddings_share_the_head() -> None:
    config = config_of(tie_word_embeddings=True)
    stage = make_stage(config, range(4))
    assert "lm_head.weight" not in dict(stage.named_parameters())
    hidden = torch.randn(1, 2, 16)
    expected = stage.model.norm(hidden) @ stage.model.embed_tokens.weight.T
    torch.testing.assert_close(stage.logits(hidden), expected)


def test_the_copies_of_a_tied_embedding_are_equal_and_their_gradients_add_up() -> None:
    config = config_of(tie_word_embeddings=True)
    tokens, labels, positions = batch(config)
    whole = make_stage(config, range(4))
    whole(tokens, positions, target=Target(labels, 0.1)).loss.backward()
    first, last = make_stage(config, range(0, 2)), make_stage(config, range(2, 4))
    copies = [stage.get_parameter(EMBEDDING) for stage in (first, last)]
    assert torch.equal(*copies)
    middle = first(tokens, positions)
    (last(*middle.tensors, target=Target(labels, 0.1)).loss + middle.loss).backward()
    together = sum(copy.grad for copy in copies)
    torch.testing.assert_close(together, whole.get_parameter(EMBEDDING).grad, rtol=1e-5, atol=1e-6)


def test_layers_for_multi_token_prediction_are_kept_or_trained() -> None:
    changes = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_nextn_predict_layers": 1}
    config = config_of(**changes)
    tokens, labels, positions = batch(config)
    losses = []
    for coef in (0.0, 0.3):
        stage = make_stage(config, range(2, 4), mtp_loss_coef=coef)
        assert (EMBEDDING in dict(stage.named_parameters())) == (coef > 0)
        hidden = torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(2))
        stage(hidden, positions, target=Target(labels, 0.1, tokens)).loss.backward()
        ahead = [p for n, p in stage.named_parameters() if ".layers.4." in n]
        assert all(p.requires_grad == (coef > 0) == (p.grad is not None) for p in ahead), coef
        record = stage.take_record()
        assert (record.mtp_loss > 0) == (coef > 0)
        losses.append(record.loss)
    assert torch.equal(*losses)
    with pytest.raises(ValueError, match="input_ids_BS"):
        stage(hidden, positions, target=Target(labels, 0.1))


def test_the_last_stage_names_a_missing_target() -> None:
    config = config_of()
    tokens, _, positions = batch(config)
    with pytest.raises(TypeError, match="Target"):
        make_stage(config, range(4))(tokens, positions)


def padded_rows(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Documents of these lengths, row by row, as tokens, labels and positions of 12 places.

    A document is a function of its length, so that it is the same wherever it stands.
    """
    made = [torch.zeros(len(rows), 12, dtype=torch.int64) + pad for pad in (0, -100, -1)]
    for number, row in enumerate(rows):
        start = 0
        for length in row:
            tokens = (torch.arange(length) * 7 + length) % 40
            labels = torch.cat((tokens[1:], torch.tensor([-100])))
            labels[0] = -100
            for part, values in zip(made, (tokens, labels, torch.arange(length)), strict=True):
                part[number, start : start + length] = values
            start += length
    return made[0], made[1], made[2]


@pytest.mark.parametrize("form", [None, "layers", "selective", "outputs"])
def test_padding_changes_neither_losses_nor_gradients_nor_loads(form: Form | None) -> None:
    config = config_of(
        model_type="glm4_moe", n_routed_experts=4, first_k_dense_replace=1, n_shared_experts=1
    ).with_mtp_layers(2)
    results = []
    for rows in ([[3, 5], [9], [1, 2]], [[9, 1, 2], [5, 3]], [[5], [2], [9], [], [1], [3]]):
        keeps = {"recompute": form, "recompute_keep": ("matrix_products",)}
        stage = make_stage(config, range(4), z_loss_coef=0.1, **keeps).double()
        tokens, labels, positions = padded_rows(rows)
        loss = stage(tokens, positions, target=Target(labels, 0.1, tokens)).loss
        assert loss is not None
        loss.backward()
        results.append((stage.take_record(), {n: p.grad for n, p in stage.named_parameters()}))
    (first, gradients), *others = results
    assert min(first.loss, first.aux_loss, first.z_loss, first.mtp_loss) > 0
    for record, found in others:
        for name in ("loss", "aux_loss", "z_loss", "mtp_loss"):
            torch.testing.assert_close(
                getattr(record, name), getattr(first, name), rtol=1e-12, atol=0
            )
        assert {n: x.tolist() for n, x in record.load_E.items()} == {
            n: x.tolist() for n, x in first.load_E.items()
        }
        torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-12)


def test_a_batch_of_padding_alone_gives_a_loss_of_zero_and_no_nan() -> None:
    config = config_of(model_type="glm4_moe", n_routed_experts=4).with_mtp_layers(1)
    stage = make_stage(config, range(4), z_loss_coef=0.1)
    tokens, labels, positions = padded_rows([[], []])
    loss = stage(tokens, positions, target=Target(labels, 1.0, tokens)).loss
    assert loss is not None
    loss.backward()
    assert loss.item() == 0
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)
