"""Prompts that do not fit are refused by name, before anything is computed."""

import re
from pathlib import Path

import pytest

from moe_train.generation import GenerationOptions, TextGenerator, check_prompts, generate_all


@pytest.fixture(scope="module")
def generator(trained_run: Path) -> TextGenerator:
    return TextGenerator.open(trained_run / "checkpoint-2")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "b has 0 tokens; the model takes at least 1 and fewer than 64; shorten it"),
        ([1] * 64, "b has 64 tokens; the model takes at least 1 and fewer than 64; shorten it"),
        ([1, 320], "b has the token 320, but the model's vocab_size is 320"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_by_name(
    generator: TextGenerator, ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_prompts(generator.model.config, [[1], ids], ["a", "b"])


def test_a_request_to_stop_ends_the_round_and_those_behind_it(generator: TextGenerator) -> None:
    asked = iter([False, False, True])
    rounds = generate_all(
        generator.model,
        generator.tokenizer,
        [[5], [6], [7]],
        GenerationOptions(max_new_tokens=20),
        batch_size=2,
        should_stop=lambda: next(asked),
    )
    (completions,) = rounds
    assert [(len(c.token_ids), c.finish_reason) for c in completions] == [(3, "interrupted")] * 2


def test_an_empty_prompt_begins_with_the_token_between_documents(generator: TextGenerator) -> None:
    options = GenerationOptions(max_new_tokens=4)
    (completion,) = generator.generate([""], options)
    end = generator.tokenizer.document_end_id
    rounds = generate_all(generator.model, generator.tokenizer, [[end]], options)
    assert next(rounds)[0].token_ids == completion.token_ids
