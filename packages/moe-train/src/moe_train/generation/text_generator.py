"""A checkpoint that is kept open to generate from, in this process.

generator = TextGenerator.open(Path("checkpoint-250"))
generator.generate(["def ", "class "], GenerationOptions(max_new_tokens=20))[1].text
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from moe_train.errors import TrainTypeError, check_type
from moe_train.generation.model_ranks import ModelOptions, ModelRanks, open_model
from moe_train.generation.options import GenerationOptions
from moe_train.generation.rounds import Completion, generate_all, prompt_ids, stream_text
from moe_train.tokenization import TextTokenizer, load_tokenizer


@final
class TextGenerator:
    """A model with its tokenizer.

    Attributes:
        model: the decoder.
        tokenizer: of the same folder.
    """

    def __init__(self, model: ModelRanks, tokenizer: TextTokenizer) -> None:
        check_type("model", model, ModelRanks)
        check_type("tokenizer", tokenizer, TextTokenizer)
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, checkpoint: Path, options: ModelOptions | None = None) -> "TextGenerator":
        """Load a transformers checkpoint of a known family, with its tokenizer.

        Raises:
            ValueError: the folder cannot be used; the message names the file and a remedy.
        """
        check_type("checkpoint", checkpoint, Path)
        tokenizer = load_tokenizer(checkpoint)
        return cls(open_model(checkpoint, options or ModelOptions(), None), tokenizer)

    def generate(
        self,
        prompts: Sequence[str],
        options: GenerationOptions | None = None,
        *,
        batch_size: int = 8,
    ) -> list[Completion]:
        """Continue each prompt, in batches; the texts do not depend on the batch.

        Raises:
            ValueError: a prompt does not fit the model.
        """
        if isinstance(prompts, str):
            raise TrainTypeError("prompts is one string; give a list of them")
        ids = [prompt_ids(prompt, self.tokenizer) for prompt in prompts]
        chosen = options or GenerationOptions()
        rounds = generate_all(self.model, self.tokenizer, ids, chosen, batch_size=batch_size)
        return [completion for completions in rounds for completion in completions]

    def stream(self, ids: Sequence[int], options: GenerationOptions) -> Iterator[str]:
        """The text that follows these tokens, in pieces of whole characters, as it comes."""
        return stream_text(self.model, self.tokenizer, ids, options)
