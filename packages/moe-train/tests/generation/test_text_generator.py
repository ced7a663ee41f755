"""A stream gives the text of `generate`."""

from pathlib import Path

import pytest

from moe_train.generation import GenerationOptions, TextGenerator


def test_a_stream_is_the_text_in_pieces(trained_run: Path) -> None:
    generator = TextGenerator.open(trained_run / "checkpoint-2")
    options = GenerationOptions(max_new_tokens=10, temperature=1.0)
    (completion,) = generator.generate(["def"], options)
    pieces = list(generator.stream(generator.tokenizer.encode_prompt("def"), options))
    assert len(pieces) == len(completion.token_ids)
    assert "".join(pieces) == completion.text
    with pytest.raises(TypeError, match="prompts is one string; give a list"):
        generator.generate("def")
    with pytest.raises(ValueError, match="batch_size=0; expected at least 1"):
        generator.generate(["def"], batch_size=0)
    with pytest.raises(TypeError, match="checkpoint must be Path, got str"):
        TextGenerator.open(str(trained_run / "checkpoint-2"))  # type: ignore[arg-type]
