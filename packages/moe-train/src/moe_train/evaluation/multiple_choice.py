"""Questions with several choices, answered by the choice that the model finds most probable.

A choice is what follows the question, a space between them where neither has white space there. Its
log-likelihood is that of its tokens behind those of the question; three ways to compare choices of
different lengths: the sum, and the mean over tokens and over UTF-8 bytes.

    question = parse_question({"question": "2+2 =", "choices": ["4", "5"], "answer": 0}, "line 1")
    measure_choices(model, [question], rows)["accuracy"]
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from moe_train.data import Batch
from moe_train.errors import TrainValueError
from moe_train.evaluation.scoring import dealt_rounds, score_rows
from moe_train.generation import ModelRanks
from moe_train.labels import IGNORED_LABEL
from moe_train.tokenization import TextTokenizer

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its choices, and the number of the right one, from 0."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """A question with one of its choices: `ids`, of which those from `start` on are the choice."""

    ids: tuple[int, ...]
    start: int


def parse_question(record: Mapping[str, Any], source: str) -> Question:
    """A question out of `question` (or `prompt`), `choices`, and `answer` (or `label`).

    Args:
        record: the answer is a number from 0, a letter from A, or the text of the choice.
        source: where it stands, for messages.

    Raises:
        ValueError: names where it stands, the key, what was given and what is expected.
    """
    prompt = record.get("question", record.get("prompt"))
    choices, answer = record.get("choices"), record.get("answer", record.get("label"))
    if not isinstance(prompt, str):
        raise TrainValueError(f"{source}: question={prompt!r}; expected text under question")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise TrainValueError(f"{source}: choices={choices!r}; expected a list of 2 texts or more")
    number: Any = answer
    if isinstance(answer, str) and answer in choices:
        number = choices.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in _LETTERS:
        number = _LETTERS.index(answer)
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if not is_number or not 0 <= number < len(choices):
        raise TrainValueError(
            f"{source}: answer={answer!r}; expected a number from 0 to {len(choices) - 1}, a "
            f"letter from A to {_LETTERS[min(len(choices), 26) - 1]}, or one of the choices"
        )
    return Question(prompt=prompt, choices=tuple(choices), answer=number)


def question_rows(
    question: Question, tokenizer: TextTokenizer, source: str, limit: int
) -> list[ChoiceRow]:
    """A row for each choice.

    Args:
        limit: tokens that the model takes.

    Raises:
        ValueError: a row is longer.
    """
    asked = _without_end(question.prompt, tokenizer)
    rows = []
    for choice in question.choices:
        gap = "" if question.prompt[-1:].isspace() or choice[0].isspace() else " "
        whole = _without_end(question.prompt + gap * bool(question.prompt) + choice, tokenizer)
        if len(whole) >= limit:
            raise TrainValueError(
                f"{source}: the question with a choice has {len(whole)} tokens; the model takes "
                f"fewer than {limit}; shorten it"
            )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
        # Something has to come first: what a text begins behind.
        start = min(sum(1 for _ in same), len(whole) - 1)
        lead = () if start else (tokenizer.document_end_id,)
        rows.append(ChoiceRow(ids=(*lead, *whole), start=start + len(lead)))
    return rows


def measure_choices(
    model: ModelRanks,
    questions: Sequence[Question],
    rows: Sequence[Sequence[ChoiceRow]],
    *,
    batch_size: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Accuracies over all questions, equal on every rank. Collective.

    Args:
        questions: the same on every rank.
        rows: those of each question.
        batch_size: rows of a rank at a time.
        should_stop: as `dealt_rounds`.

    Returns:
        `questions`, and `accuracy`, `accuracy_per_token` and `accuracy_per_byte`, each with its
        standard error under `..._stderr`.
    """
    flat = [row for of_question in rows for row in of_question]
    scores = iter(log_likelihoods(model, flat, batch_size, should_stop))
    hits = {"accuracy": 0, "accuracy_per_token": 0, "accuracy_per_byte": 0}
    for question, of_question in zip(questions, rows, strict=True):
        sums = [next(scores) for _ in of_question]
        tokens = [len(row.ids) - row.start for row in of_question]
        sizes = [len(choice.encode(errors="surrogatepass")) for choice in question.choices]
        for name, lengths in zip(hits, ([1] * len(sums), tokens, sizes), strict=True):
            means = [value / length for value, length in zip(sums, lengths, strict=True)]
            hits[name] += means.index(max(means)) == question.answer
    figures: dict[str, float] = {"questions": len(questions)}
    for name, count in hits.items():
        share = count / len(questions)
        figures[name] = share
        # Of a mean of zeros and ones, with the variance estimated from them.
        figures[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(questions) - 1))
    return figures


def log_likelihoods(
    model: ModelRanks, rows: Sequence[ChoiceRow], batch_size: int, should_stop: Callable[[], bool]
) -> list[float]:
    """The log-likelihood of each row's choice, equal on every rank, in nats. Collective."""
    found = [0.0] * len(rows)
    for own in dealt_rounds(model, len(rows), batch_size, should_stop):
        nats_B = score_rows(model, _choice_batch([rows[number] for number in own]))
        if nats_B is not None:
            for number, nats in zip(own, nats_B.tolist(), strict=True):
                found[number] = -nats
    return model.sum_over_ranks(found)


def _choice_batch(rows: Sequence[ChoiceRow]) -> Batch:
    """Rows padded on the right; labels where the next token is the choice's."""
    shape = (len(rows), max((len(row.ids) - 1 for row in rows), default=1))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    labels, positions = torch.full(shape, IGNORED_LABEL), torch.full(shape, -1)
    for b, row in enumerate(rows):
        length = len(row.ids) - 1
        ids = torch.tensor(row.ids)
        input_ids[b, :length], positions[b, :length] = ids[:-1], torch.arange(length)
        labels[b, row.start - 1 : length] = ids[row.start :]
    return Batch(input_ids=input_ids, labels=labels, position_ids=positions)


def _without_end(text: str, tokenizer: TextTokenizer) -> list[int]:
    """The tokens of a prompt, without an end token that some tokenizers put behind every text."""
    ids = tokenizer.encode_prompt(text)
    return ids[:-1] if ids and ids[-1] in tokenizer.eos_token_ids else ids
