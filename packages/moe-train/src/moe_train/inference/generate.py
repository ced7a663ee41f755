"""Text from a checkpoint: what is checked before any rank starts, and what each rank runs.

text = generate_text(Path("checkpoint-250"), "def ", max_new_tokens=64, seed=0)
"""

import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_train.errors import TrainValueError, check_type
from moe_train.generation import (
    Completion,
    GenerationOptions,
    ModelOptions,
    ModelRanks,
    TextGenerator,
    check_model,
    check_prompts,
    generate_all,
    prompt_ids,
    stream_text,
)
from moe_train.inference.json_lines import Record, read_records
from moe_train.inference.running import job_from_json, model_of_rank, run_inference
from moe_train.inference.stored_model import stored_model
from moe_train.rank import RankContext
from moe_train.tokenization import TextTokenizer, load_tokenizer, whole_text

logger = logging.getLogger(__name__)


def generate_text(
    checkpoint: Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> str:
    """Continue `prompt`; the answer holds the prompt and ends before an end token or stop string.

    `TextGenerator` keeps the model open and has all options.

    Args:
        temperature: 0 takes the most probable token each time.
        top_k: sample among this many most probable tokens; 0 means all.
        seed: of what is drawn.
        stop: strings that end the text.

    Raises:
        TypeError, ValueError: an argument is out of range, or the checkpoint cannot be read.
    """
    check_type("checkpoint", checkpoint, Path)
    check_type("prompt", prompt, str)
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop),
    )
    return prompt + TextGenerator.open(checkpoint).generate([prompt], options)[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What `moe-train generate` and a question of `moe-train chat` run.

    Attributes:
        checkpoint: folder or URL of a transformers checkpoint.
        record: has the text `prompt`, or the `messages` of a conversation.
        prompts_file: JSON lines, a record in each; stands for `record`.
        output: file of JSON lines, "-" for standard output; None: the text of the only prompt is
            shown as it comes.
        shows_prompt: ahead of that text.
        batch_size: rows of a rank at a time.
    """

    checkpoint: str
    record: Mapping[str, Any] | None = None
    prompts_file: str | None = None
    output: str | None = None
    shows_prompt: bool = True
    batch_size: int = 8
    model: ModelOptions = field(default_factory=ModelOptions)
    options: GenerationOptions = field(default_factory=GenerationOptions)


def generate(job: GenerateJob) -> signal.Signals | None:
    """Check the job, run it on the ranks of its layout, and show or write the texts.

    Returns:
        The signal on which started ranks ended early; None: they ran to the end.

    Raises:
        ValueError: one message with what was given, what is expected and what to change.
        RankFailedError: a rank failed or was killed.
    """
    with stored_model(job.checkpoint) as (checkpoint, _):
        config = check_model(checkpoint, job.model.parallel)
        tokenizer = load_tokenizer(checkpoint)
    if job.batch_size < 1:
        raise TrainValueError(f"batch_size={job.batch_size}; expected at least 1")
    sources, records = read_prompts(job)
    check_prompts(config, _encoded(sources, records, tokenizer), sources)
    return run_inference(run_generate, asdict(job), job.model)


def run_generate(text: str, context: RankContext) -> None:
    """Generate on this rank. Collective over all ranks.

    Args:
        text: the job as JSON.
        context: asked after each token whether to stop.
    """
    job = job_from_json(GenerateJob, text)
    sources, records = read_prompts(job)
    with ExitStack() as stack:
        checkpoint, place = stack.enter_context(stored_model(job.checkpoint))
        tokenizer = load_tokenizer(checkpoint)
        prompts = _encoded(sources, records, tokenizer)
        model = stack.enter_context(model_of_rank(checkpoint, job.model, place))
        if job.output is not None:
            rounds = generate_all(
                model,
                tokenizer,
                prompts,
                job.options,
                batch_size=job.batch_size,
                should_stop=lambda: context.stop_requested,
            )
            _write(job, records, rounds, is_writer=model.is_writer)
        else:
            if model.is_writer and job.shows_prompt:
                print(whole_text(records[0].get("prompt", "")), end="", flush=True)
            for _ in show_text(model, tokenizer, prompts[0], job.options, context):
                pass


def show_text(
    model: ModelRanks,
    tokenizer: TextTokenizer,
    ids: Sequence[int],
    options: GenerationOptions,
    context: RankContext,
) -> Iterator[str]:
    """The text behind these tokens on standard output, as it comes. Collective.

    Yields:
        Each piece, when it is shown; on other ranks than the writer empty strings.
    """
    pieces = stream_text(model, tokenizer, ids, options, should_stop=lambda: context.stop_requested)
    for piece in pieces:
        if model.is_writer:
            print(piece, end="", flush=True)
        yield piece
    if model.is_writer:
        print(flush=True)


def _write(
    job: GenerateJob,
    records: Sequence[Record],
    rounds: Iterator[list[Completion]],
    *,
    is_writer: bool,
) -> None:
    """A JSON line for each text, in the order of the prompts, as the rounds end."""
    with ExitStack() as stack:
        out = sys.stdout
        if is_writer and job.output not in (None, "-"):
            out = stack.enter_context(Path(str(job.output)).open("w", encoding="utf-8"))
        for completions in rounds:
            for completion in completions:
                out.write(_line(records[completion.prompt_index], completion, job.options))
            out.flush()
            if completions:
                done = completions[-1].prompt_index + 1
                logger.info("generated for %d of %d prompts", done, len(records))


def _line(record: Record, completion: Completion, options: GenerationOptions) -> str:
    found: Record = {
        **record,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
    }
    if options.num_return_sequences > 1:
        found["sequence_index"] = completion.sequence_index
    return whole_text(json.dumps(found, ensure_ascii=False)) + "\n"


def read_prompts(job: GenerateJob) -> tuple[list[str], list[Record]]:
    """What each record is called in messages, and the records.

    Raises:
        ValueError: the file cannot be read; names the line.
    """
    if job.prompts_file is None:
        return ["the prompt"], [dict(job.record or {})]
    numbered = read_records(Path(job.prompts_file))
    names = [f"{job.prompts_file}, line {number}" for number, _ in numbered]
    return names, [record for _, record in numbered]


def _encoded(
    sources: Sequence[str], records: Sequence[Record], tokenizer: TextTokenizer
) -> list[list[int]]:
    """The tokens of every prompt.

    Raises:
        ValueError: a record has no prompt; names where it stands.
    """
    found = []
    for source, record in zip(sources, records, strict=True):
        prompt, messages = record.get("prompt"), record.get("messages")
        if isinstance(prompt, str) and messages is None:
            found.append(prompt_ids(prompt, tokenizer))
        elif isinstance(messages, list) and prompt is None:
            found.append(chat_ids(messages, record.get("tools"), tokenizer, source))
        else:
            raise TrainValueError(
                f"{source}: expected an object with the text `prompt` or the list `messages`, got "
                f"the keys {', '.join(record) or 'none'}"
            )
    return found


def chat_ids(
    messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: TextTokenizer, source: str
) -> list[int]:
    """The tokens behind which the assistant's next turn begins.

    Raises:
        ValueError: there is no chat template, or it refuses the conversation.
    """
    try:
        text = tokenizer.render_chat(messages, tools=tools, add_generation_prompt=True)
    except TrainValueError as error:
        raise TrainValueError(f"{source}: {error}") from error
    return tokenizer.encode_prompt(text, add_special_tokens=False)
