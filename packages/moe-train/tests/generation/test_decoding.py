"""A batch against each prompt alone, and the tokens that are computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_train.generation import GenerationOptions, TextGenerator
from moe_train.generation.decoding import left_padded

PROMPTS = ["def self", "value", "é None for in import", "x"]


@pytest.fixture(scope="module")
def generator(trained_run: Path) -> TextGenerator:
    return TextGenerator.open(trained_run / "checkpoint-2")


def test_greedy_text_takes_the_most_probable_token_of_the_whole_sequence(
    generator: TextGenerator,
) -> None:
    stage, tokenizer = generator.model.stage, generator.tokenizer
    (completion,) = generator.generate(["def self"], GenerationOptions(max_new_tokens=12))
    tokens = tokenizer.encode_prompt("def self")
    with torch.no_grad():
        for token in completion.token_ids:
            positions = torch.arange(len(tokens))[None]
            hidden, _ = stage.hidden_states(torch.tensor([tokens]), positions)
            assert token == int(stage.logits(hidden)[0, -1].argmax())
            tokens.append(token)
    assert "def self" + completion.text == tokenizer.decode(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_text_does_not_depend_on_those_beside_it(
    generator: TextGenerator, temperature: float
) -> None:
    options = GenerationOptions(max_new_tokens=15, temperature=temperature, seed=5, stop=("in",))
    together = generator.generate(PROMPTS, options)
    alone = [generator.generate([prompt], options)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]
    assert generator.generate(PROMPTS, options, batch_size=3) == together


def test_each_token_is_computed_once(generator: TextGenerator, monkeypatch: Any) -> None:
    stage, computed = generator.model.stage, []
    forward = stage.hidden_states

    def counting(first: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> Any:
        computed.append(int((positions >= 0).sum()))
        return forward(first, positions, cache)

    monkeypatch.setattr(stage, "hidden_states", counting)
    completions = generator.generate(PROMPTS, GenerationOptions(max_new_tokens=9))
    prompts = sum(len(generator.tokenizer.encode_prompt(p)) for p in PROMPTS)
    # The last token of a text is not needed to go on.
    generated = sum(len(c.token_ids) - 1 for c in completions)
    assert sum(computed) == prompts + generated


def test_an_end_token_ends_a_text_and_is_no_part_of_it(generator: TextGenerator) -> None:
    options = GenerationOptions(max_new_tokens=60, temperature=20.0, num_return_sequences=12)
    ended = [c for c in generator.generate(["def"], options) if c.finish_reason == "end"]
    for completion in ended:
        assert completion.token_ids[-1] in generator.tokenizer.eos_token_ids
        assert generator.tokenizer.decode(completion.token_ids[:-1])[-3:] == completion.text[-3:]


def test_texts_of_one_prompt_differ_and_the_first_is_that_of_one(generator: TextGenerator) -> None:
    options = {"max_new_tokens": 8, "temperature": 2.0, "seed": 3}
    three = generator.generate(["a", "b"], GenerationOptions(**options, num_return_sequences=3))
    assert [(c.prompt_index, c.sequence_index) for c in three] == [
        (n, k) for n in range(2) for k in range(3)
    ]
    assert len({c.text for c in three[:3]}) == 3
    assert three[0] == generator.generate(["a"], GenerationOptions(**options))[0]


def test_text_ends_where_the_models_positions_end(generator: TextGenerator) -> None:
    (completion,) = generator.generate(["def self"], GenerationOptions(max_new_tokens=500))
    used = len(generator.tokenizer.encode_prompt("def self")) + len(completion.token_ids)
    assert used == 64 or completion.finish_reason == "end"


def test_rows_end_together_and_padding_has_no_position() -> None:
    input_ids, positions = left_padded([(5, 6, 7), (8,)])
    assert input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert positions.tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert [x.shape for x in left_padded([])] == [(0, 1), (0, 1)]
