"""A conversation with a model: in the terminal, or one question for a script.

In one process Ctrl-C ends the answer that is being written, and the conversation goes on. On
several processes rank 0 reads the lines and tells the other ranks, and Ctrl-C ends the job.

    chat(ChatJob(checkpoint="checkpoint-250", system="Be brief."))
"""

import os
import queue
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from comm_collectives import broadcast_nested
from moe_train.errors import TrainValueError
from moe_train.generation import (
    GenerationOptions,
    ModelOptions,
    ModelRanks,
    check_model,
    check_prompts,
)
from moe_train.inference.generate import GenerateJob, chat_ids, generate, show_text
from moe_train.inference.running import job_from_json, model_of_rank, run_inference
from moe_train.inference.stored_model import stored_model
from moe_train.rank import RankContext
from moe_train.tokenization import TextTokenizer, load_tokenizer

_POLL_S = 0.5
_EXIT = "/exit"
_STDIN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """What `moe-train chat` runs.

    Attributes:
        checkpoint: folder or URL of a transformers checkpoint whose tokenizer has a chat template.
        system: the message ahead of the conversation.
        message: the only question; None: lines of standard input.
    """

    checkpoint: str
    system: str | None = None
    message: str | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    options: GenerationOptions = field(default_factory=GenerationOptions)


def chat(job: ChatJob) -> signal.Signals | None:
    """Check the job and run it.

    Returns:
        The signal on which started ranks ended early; None: they ran to the end.

    Raises:
        ValueError: one message with what was given, what is expected and what to change.
        RankFailedError: a rank failed or was killed.
    """
    messages = _opening(job)
    if job.message is not None:
        record = {"messages": [*messages, {"role": "user", "content": job.message}]}
        return generate(
            GenerateJob(
                checkpoint=job.checkpoint, record=record, model=job.model, options=job.options
            )
        )
    with stored_model(job.checkpoint) as (folder, place):
        check_model(folder, job.model.parallel)
        question = {"role": "user", "content": "Hello"}
        chat_ids([*messages, question], None, load_tokenizer(folder), str(place))
    return run_inference(run_chat, asdict(job), job.model)


def run_chat(text: str, context: RankContext) -> None:
    """Hold the conversation on this rank. Collective over all ranks.

    Args:
        text: the job as JSON.
        context: asked after each token and while waiting whether to stop.
    """
    job = job_from_json(ChatJob, text)
    with ExitStack() as stack:
        folder, place = stack.enter_context(stored_model(job.checkpoint))
        tokenizer, messages = load_tokenizer(folder), _opening(job)
        model = stack.enter_context(model_of_rank(folder, job.model, place))
        lines = _SharedLines(model, context)
        while (line := lines.next()) is not None:
            if line:
                messages = _turn(job, model, tokenizer, context, [*messages, _said("user", line)])


def _turn(
    job: ChatJob,
    model: ModelRanks,
    tokenizer: TextTokenizer,
    context: RankContext,
    messages: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Show the answer to the last message; returns the conversation with it.

    What the template or the model refuses is said in a line, and the last message is taken back.
    """
    try:
        ids = chat_ids(messages, None, tokenizer, "the conversation")
        check_prompts(model.config, [ids], ["the conversation"])
    except TrainValueError as error:
        if model.is_writer:
            print(f"moe-train: {error}", file=sys.stderr)
        return messages[:-1]
    pieces: list[str] = []
    try:
        for piece in show_text(model, tokenizer, ids, job.options, context):
            pieces.append(piece)
    except KeyboardInterrupt:
        print(" ...", flush=True)
    # The last stage has the answer; all ranks need it for the next turn.
    answer = "".join(pieces)
    if model.parallel is not None:
        src = model.writer_rank
        answer = cast(str, broadcast_nested(answer, src=src, timeout_s=model.timeout_s))
    return [*messages, _said("assistant", answer)]


class _SharedLines:
    """Lines of standard input, the same on every rank."""

    def __init__(self, model: ModelRanks, context: RankContext) -> None:
        self._model = model
        self._context = context
        self._read: queue.Queue[str | None] = queue.Queue()
        parallel = model.parallel
        self._is_reader = parallel is not None and parallel.rank == 0
        if self._is_reader:
            # Ends with the process, which may be asked to while nobody types.
            threading.Thread(target=_read_stdin, args=(self._read,), daemon=True).start()

    def next(self) -> str | None:
        """The next line without white space around it; None at the end. Collective."""
        if self._model.is_writer and os.isatty(_STDIN):
            print("> ", end="", flush=True)
        line = self._typed() if self._model.parallel is None else self._told()
        return None if line is None or line.strip() == _EXIT else line.strip()

    def _typed(self) -> str | None:
        while True:
            try:
                return sys.stdin.readline() or None
            except KeyboardInterrupt:
                print(f"\n{_EXIT} or Ctrl-D ends the conversation\n> ", end="", flush=True)

    def _told(self) -> str | None:
        """What rank 0 has read; it says so every half second, so that no rank waits in vain."""
        while True:
            found: tuple[bool, str | None] = (False, None)
            if self._is_reader:
                try:
                    found = (True, self._read.get(timeout=_POLL_S))
                except queue.Empty:
                    found = (self._context.stop_requested, None)
            limit = self._model.timeout_s
            found = cast("tuple[bool, str | None]", broadcast_nested(found, src=0, timeout_s=limit))
            if found[0]:
                return found[1]


def _read_stdin(lines: "queue.Queue[str | None]") -> None:
    """Put each line of standard input into the queue, and None at its end."""
    rest = b""
    # Not sys.stdin: a thread that holds its lock would keep the process from ending.
    while data := os.read(_STDIN, 65536):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line.decode(errors="replace"))
    if rest:
        lines.put(rest.decode(errors="replace"))
    lines.put(None)


def _opening(job: ChatJob) -> list[dict[str, Any]]:
    return [] if job.system is None else [_said("system", job.system)]


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
