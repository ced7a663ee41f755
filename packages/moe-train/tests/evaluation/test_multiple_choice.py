"""Questions are checked by file and line; scores do not depend on the layout."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from moe_train.config import ParallelConfig
from moe_train.evaluation import measure_choices, multiple_choice, parse_question, question_rows
from moe_train.generation import ModelOptions, open_model
from moe_train.parallel import join
from moe_train.tokenization import load_tokenizer
from ranktest import run_ranks

GOOD: dict[str, Any] = {"question": "2+2 =", "choices": ["4", "five", "é"], "answer": 0}
RECORDS = [
    GOOD,
    {"prompt": "def ", "choices": ["self", "return"], "label": "B"},
    {"question": "", "choices": ["import", "value None"], "answer": "import"},
    {"question": "for", "choices": [" in", "x", "None in for"], "answer": 2},
    {"question": "self self", "choices": ["a", "b"], "answer": 1},
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": 3}, "question=3; expected text under question"),
        ({"choices": ["a"]}, "choices=['a']; expected a list of 2 texts or more"),
        ({"choices": ["a", ""]}, "choices=['a', '']; expected a list of 2 texts or more"),
        ({"choices": "ab"}, "choices='ab'; expected a list of 2 texts or more"),
        ({"answer": 3}, "answer=3; expected a number from 0 to 2, a letter from A to C, or one"),
        ({"answer": -1}, "answer=-1; expected a number from 0 to 2"),
        ({"answer": True}, "answer=True; expected a number from 0 to 2"),
        ({"answer": "D"}, "answer='D'; expected a number from 0 to 2"),
        ({"answer": None}, "answer=None; expected a number from 0 to 2"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^q.jsonl, line 7: {re.escape(message)}"):
        parse_question({**GOOD, **changes}, "q.jsonl, line 7")


def test_an_answer_is_a_number_a_letter_or_the_text() -> None:
    for answer, number in ((1, 1), ("C", 2), ("five", 1), ("4", 0)):
        assert parse_question({**GOOD, "answer": answer}, "x").answer == number


def test_a_row_is_the_question_and_the_choice_behind_a_space(trained_run: Path) -> None:
    tokenizer = load_tokenizer(trained_run / "checkpoint-2")
    texts = {0: "2+2 = five", 1: "def return", 2: "value None", 3: "forx", 4: "self self b"}
    texts[3] = "for x"
    for number, expected in texts.items():
        question = parse_question(RECORDS[number], "x")
        row = question_rows(question, tokenizer, "x", 64)[1]
        assert tokenizer.decode(row.ids) == expected
        assert tokenizer.decode(row.ids[row.start :]).strip() == question.choices[1]
    with pytest.raises(ValueError, match=r"^x: the question with a choice has \d+ tokens; the mod"):
        question_rows(parse_question(GOOD, "x"), tokenizer, "x", 3)


def test_accuracies_count_the_most_probable_choice_by_each_measure(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(trained_run / "checkpoint-2")
    questions = [parse_question(record, "x") for record in (GOOD, RECORDS[4])]
    rows = [question_rows(question, tokenizer, "x", 64) for question in questions]
    lengths = [len(row.ids) - row.start for row in rows[0]]
    # The first question is right by the sum alone, the second by none.
    scores = [-3.0, -3.1, -3.2, -1.0, -2.0]
    monkeypatch.setattr(multiple_choice, "log_likelihoods", lambda *_: scores)
    figures = measure_choices(None, questions, rows)  # type: ignore[arg-type]
    assert figures["questions"] == 2 and figures["accuracy"] == 0.5
    assert figures["accuracy_stderr"] == pytest.approx(math.sqrt(0.25 / 1))
    assert figures["accuracy_per_byte"] == 0.0
    best = min(range(3), key=lambda n: -scores[n] / lengths[n])
    assert figures["accuracy_per_token"] == (0.5 if best == 0 else 0.0)


def test_likelihoods_are_those_of_one_process_in_every_layout(trained_run: Path) -> None:
    checkpoint = trained_run / "checkpoint-2"
    tokenizer = load_tokenizer(checkpoint)
    questions = [parse_question(record, "x") for record in RECORDS]
    rows = [row for q in questions for row in question_rows(q, tokenizer, "x", 64)]
    alone = open_model(checkpoint, ModelOptions(device="cpu"), None)
    expected = multiple_choice.log_likelihoods(alone, rows, 1, lambda: False)

    def on_rank(*_: Any) -> list[float]:
        parallel = ParallelConfig(pp=2, ep=2, timeout_s=60)
        options = ModelOptions(device="cpu", parallel=parallel)
        model = open_model(checkpoint, options, join(parallel, "cpu"))
        return multiple_choice.log_likelihoods(model, rows, 4, lambda: False)

    for found in run_ranks(on_rank, 4):
        assert found == pytest.approx(expected, rel=1e-5)


def test_halves_of_characters_in_choices_are_read(trained_run: Path) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    tokenizer = load_tokenizer(trained_run / "checkpoint-2")
    found = []
    for choice in ("\ud800", "\ufffd"):
        question = parse_question({**GOOD, "choices": ["4", choice]}, "x")
        rows = [question_rows(question, tokenizer, "x", 64)]
        found.append(measure_choices(model, [question], rows))
    assert found[0] == found[1]
