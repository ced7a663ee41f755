"""Each row's sum is that of its own labels, whatever stands beside it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_train.data import Batch
from moe_train.evaluation import scoring
from moe_train.generation import ModelOptions, open_model


def test_a_rows_score_is_the_sum_of_its_labels(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    ids, labels = torch.randint(1, 300, (3, 9)), torch.randint(1, 300, (3, 9))
    labels[0, 4:], labels[1] = -100, -100
    positions = torch.arange(9).repeat(3, 1)
    with torch.no_grad():
        logits = model.stage.logits(model.stage.hidden_states(ids, positions)[0]).double()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 9)
    batch = Batch(input_ids=ids, labels=labels, position_ids=positions)
    for chunk in (1024, 4):
        monkeypatch.setattr(scoring, "_CHUNK_TOKENS", chunk)
        scores = scoring.score_rows(model, batch)
        assert scores is not None
        torch.testing.assert_close(scores, each.sum(1), rtol=1e-6, atol=0)
    none = Batch(input_ids=ids[:0], labels=labels[:0], position_ids=positions[:0])
    assert scoring.score_rows(model, none).tolist() == []  # type: ignore[union-attr]


def test_rounds_deal_out_every_number_once_and_end_when_asked(trained_run: Path) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    rounds = list(scoring.dealt_rounds(model, 50, 3, lambda: False))
    assert [n for numbers in rounds for n in numbers] == list(range(50))
    asked = iter([False, True])
    done = scoring.dealt_rounds(model, 50, 3, lambda: next(asked))
    with pytest.raises(scoring.EvaluationStoppedError, match="there are no figures"):
        for number, _ in enumerate(done, start=1):
            assert number <= 16


def test_a_model_whose_logits_are_no_numbers_has_no_figures(trained_run: Path) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    ids, positions = torch.randint(1, 300, (2, 5)), torch.arange(5).repeat(2, 1)
    batch = Batch(input_ids=ids, labels=ids, position_ids=positions)
    with torch.no_grad():
        next(model.stage.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are not finite numbers; the weights are damaged"):
        scoring.score_rows(model, batch)
