"""The command `moe-train chat`: a conversation in the terminal, or one question for a script."""

import argparse

from moe_train.commands.generate import read_text_file
from moe_train.commands.model_options import (
    add_model_options,
    add_sampling_options,
    generation_options_of,
    model_options_of,
)
from moe_train.commands.options import Command

_CHAT_NOTES = """\
The chat template is that of the checkpoint. /exit or the end of the input ends the conversation,
Ctrl-C the answer that is being written.

  moe-train chat DIR --system "Answer in one line." --temperature 0.7
  moe-train chat DIR --message "What is a router?" > answer.txt
"""


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _CHAT_NOTES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "a folder of a run, or of any transformers checkpoint of a known family; or a URL"
    parser.add_argument("checkpoint", metavar="DIR", help=text)
    parser.add_argument(
        "--system", metavar="TEXT", help="the message that the conversation is under"
    )
    text = "ask this, print the answer and end; - reads it from standard input"
    parser.add_argument("--message", metavar="TEXT", help=text)
    add_sampling_options(parser)
    add_model_options(parser)
    parser.set_defaults(max_new_tokens=1024)


def _chat(arguments: argparse.Namespace) -> int:
    """Talk with a model that has a chat template."""
    from moe_train.inference import ChatJob, chat

    message = read_text_file(None) if arguments.message == "-" else arguments.message
    stopped_by = chat(
        ChatJob(
            checkpoint=arguments.checkpoint,
            system=arguments.system,
            message=message,
            model=model_options_of(arguments),
            options=generation_options_of(arguments),
        )
    )
    return 0 if stopped_by is None else 128 + int(stopped_by)


CHAT = Command(name="chat", text="talk with a model", add=_add_chat, run=_chat)
"""Its options and what it runs."""
