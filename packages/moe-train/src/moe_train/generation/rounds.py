"""Many prompts, a batch of them on each rank at a time.

A round takes the next prompts and deals them out to the ranks that hold other rows; a rank may get
none. The results come back together on the rank that shows them.

    for completions in generate_all(model, tokenizer, prompts, options, batch_size=8):
        ...                                                     # empty on the other ranks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from comm_collectives import broadcast_nested
from moe_train.errors import TrainValueError
from moe_train.generation.decoding import Decoding, Prompt, Row
from moe_train.generation.model_ranks import ModelRanks
from moe_train.generation.options import GenerationOptions
from moe_train.model import DecoderConfig
from moe_train.tokenization import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What follows a prompt.

    Attributes:
        prompt_index: which of the prompts.
        sequence_index: which text of that prompt.
        text: without the prompt, special tokens, and what follows a stop string.
        token_ids: all tokens that were generated, an end token included.
        finish_reason: "end" (an end token), "stop" (a stop string), "length" or "interrupted".
    """

    prompt_index: int
    sequence_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def generate_all(
    model: ModelRanks,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    batch_size: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[Completion]]:
    """Continue prompts; yields after each round, in their order. Collective.

    Args:
        prompts: token ids, the same on every rank.
        batch_size: rows of a rank at a time; the texts do not depend on it.
        should_stop: asked after each token; any rank's yes ends all of them.

    Yields:
        The completions of the round on the rank with `is_writer`, nothing on the others.

    Raises:
        ValueError: a prompt does not fit the model, or a batch has no rows.
    """
    check_prompts(model.config, prompts)
    if batch_size < 1:
        raise TrainValueError(f"batch_size={batch_size}; expected at least 1")
    wanted = [(n, k) for n in range(len(prompts)) for k in range(options.num_return_sequences)]
    per_round = batch_size * model.num_data_ranks
    for first in range(0, len(wanted), per_round):
        own = wanted[first : first + per_round][model.data_rank :: model.num_data_ranks]
        rows = [Prompt(ids=tuple(prompts[n]), sequence_index=k) for n, k in own]
        decoding = Decoding(model, tokenizer, rows, options)
        while decoding.step(stop=should_stop()):
            pass
        done = [_completion(*which, row) for which, row in zip(own, decoding.rows, strict=True)]
        yield _gathered(model, done)
        if decoding.interrupted:
            return


def stream_text(
    model: ModelRanks,
    tokenizer: TextTokenizer,
    ids: Sequence[int],
    options: GenerationOptions,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Continue one prompt; yields the text as it comes, in whole characters. Collective.

    Yields:
        On the rank with `is_writer` the new text of each token, which may be empty; on the others
        nothing but empty strings.
    """
    check_prompts(model.config, [ids])
    rows = [Prompt(ids=tuple(ids))] if model.data_rank == 0 else []
    decoding = Decoding(model, tokenizer, rows, options)
    goes_on = True
    while goes_on:
        goes_on = decoding.step(stop=should_stop())
        yield decoding.rows[0].take_text() if model.is_writer else ""


def prompt_ids(text: str, tokenizer: TextTokenizer) -> list[int]:
    """The tokens of a prompt; of an empty one the end token, behind which a text begins."""
    return tokenizer.encode_prompt(text) or [tokenizer.document_end_id]


def check_prompts(
    config: DecoderConfig, prompts: Sequence[Sequence[int]], sources: Sequence[str] = ()
) -> None:
    """Refuse prompts that leave no room for a token, or have tokens that the model lacks.

    Args:
        sources: what each is called in a message.

    Raises:
        ValueError: names the prompt, the number of its tokens and the limit.
    """
    limit = config.max_position_embeddings
    for number, ids in enumerate(prompts):
        name = sources[number] if sources else f"prompt {number + 1}"
        if not 0 < len(ids) < limit:
            raise TrainValueError(
                f"{name} has {len(ids)} tokens; the model takes at least 1 and fewer than {limit}; "
                "shorten it"
            )
        if max(ids) >= config.vocab_size:
            raise TrainValueError(
                f"{name} has the token {max(ids)}, but the model's vocab_size is "
                f"{config.vocab_size}; the tokenizer is not that of the model"
            )


def _completion(prompt_index: int, sequence_index: int, row: Row) -> Completion:
    return Completion(
        prompt_index=prompt_index,
        sequence_index=sequence_index,
        text=row.stream.text,
        token_ids=tuple(row.ids[row.num_prompt_tokens :]),
        finish_reason=row.finish_reason,
    )


def _gathered(model: ModelRanks, own: list[Completion]) -> list[Completion]:
    """The completions of all ranks on the one that shows them."""
    if not model.is_last:
        return []
    parallel, parts = model.parallel, [own]
    if parallel is not None and parallel.num_data_ranks > 1:
        group, limit = parallel.data_group, model.timeout_s
        parts = [
            cast(list[Completion], broadcast_nested(own, src=src, group=group, timeout_s=limit))
            for src in range(parallel.num_data_ranks)
        ]
    if not model.is_writer:
        return []
    flat = [completion for part in parts for completion in part]
    return sorted(flat, key=lambda each: (each.prompt_index, each.sequence_index))
