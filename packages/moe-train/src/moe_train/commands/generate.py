"""The command `moe-train generate`: one text as it comes, or a file of prompts."""

import argparse
import sys
from pathlib import Path

from moe_train.commands.model_options import (
    add_model_options,
    add_sampling_options,
    generation_options_of,
    model_options_of,
)
from moe_train.commands.options import Command
from moe_train.errors import MissingFileError, TrainValueError

_GENERATE_NOTES = """\
A line of --prompts holds `{"prompt": TEXT}` or `{"messages": [...]}`; each line of the output is
that object with `completion`, `finish_reason` ("end", "stop" or "length") and `num_tokens`.

  moe-train generate --checkpoint DIR --prompt "def " --temperature 0.8 --top-k 50
  moe-train generate --checkpoint DIR --prompts in.jsonl --output out.jsonl parallel.ep=2
"""


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _GENERATE_NOTES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    text = "a folder of a run, or of any transformers checkpoint of a known family; or a URL"
    add("--checkpoint", metavar="DIR", required=True, help=text)
    source = parser.add_mutually_exclusive_group(required=True)
    text = "how the text begins; - reads it from standard input"
    source.add_argument("--prompt", metavar="TEXT", help=text)
    source.add_argument("--prompt-file", metavar="FILE", type=Path, help="a file with the prompt")
    text = "JSON lines, a prompt or conversation in each"
    source.add_argument("--prompts", metavar="FILE", type=Path, help=text)
    text = "write JSON lines there; default with --prompts: standard output"
    add("--output", metavar="FILE", type=Path, help=text)
    add("--num-return-sequences", metavar="N", type=int, default=1, help="texts of each prompt")
    text = "prompts of a rank at a time; default 8"
    add("--batch-size", metavar="N", type=int, default=8, help=text)
    add_sampling_options(parser)
    add_model_options(parser)


def _generate(arguments: argparse.Namespace) -> int:
    """Print the prompt and what a trained model makes of it."""
    from moe_train.inference import GenerateJob, generate

    record = None if arguments.prompts is not None else {"prompt": _prompt(arguments)}
    is_shown = arguments.prompts is None and arguments.num_return_sequences == 1
    output = None if is_shown and arguments.output is None else str(arguments.output or "-")
    stopped_by = generate(
        GenerateJob(
            checkpoint=arguments.checkpoint,
            record=record,
            prompts_file=None if arguments.prompts is None else str(arguments.prompts),
            output=output,
            batch_size=arguments.batch_size,
            model=model_options_of(arguments),
            options=generation_options_of(arguments, arguments.num_return_sequences),
        )
    )
    return 0 if stopped_by is None else 128 + int(stopped_by)


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is not None:
        return read_text_file(arguments.prompt_file)
    return read_text_file(None) if arguments.prompt == "-" else str(arguments.prompt)


def read_text_file(path: Path | None) -> str:
    """The text of a file that an option names, or of standard input, with its ends of lines.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not UTF-8 text.
    """
    try:
        return (sys.stdin.buffer.read() if path is None else path.read_bytes()).decode()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist; name a file with the prompt") from error
    except (OSError, UnicodeDecodeError) as error:
        name = path or "standard input"
        raise TrainValueError(f"{name} cannot be read as UTF-8 text: {error}") from error


GENERATE = Command(
    name="generate", text="print text from a model", add=_add_generate, run=_generate
)
"""Its options and what it runs."""
