"""The command `moe-train eval`: perplexity of a held-out set, or accuracy on questions."""

import argparse
import json
from pathlib import Path

from moe_train.commands.model_options import add_model_options, model_options_of
from moe_train.commands.options import OVERRIDE, Command

_KINDS = ("text", "chat", "tokens", "multiple_choice")
_EVAL_NOTES = """\
Perplexity is over all documents, each token but a document's first predicted once; of conversations
over what the assistant wrote. Questions are JSON lines: {"question": TEXT, "choices": [TEXT, ...],
"answer": 0}; the answer may also be a letter (A is the first) or the text of the choice.

  moe-train eval runs/a/checkpoint-500 job.toml
  moe-train eval DIR held_out.jsonl --field text --json figures.json --ep 2
  moe-train eval DIR questions.jsonl --kind multiple_choice
"""


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EVAL_NOTES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    text = "a folder of a run, or of any transformers checkpoint of a known family; or a URL"
    add("checkpoint", metavar="DIR", help=text)
    text = "a job's TOML file, for its held-out text; or files, folders and globs"
    add("data", metavar="DATA", nargs="+", help=text)
    add("--kind", choices=_KINDS, default="text", help="what the files hold; default text")
    add("--field", metavar="NAME", help="where a row has its content; default: text, or messages")
    text = "tokens of a sequence; default: the job's, or the model's, at most 2048"
    add("--sequence-length", metavar="N", type=int, help=text)
    add(
        "--batch-size", metavar="N", type=int, default=8, help="rows of a rank at a time; default 8"
    )
    add("--json", metavar="FILE", type=Path, help="also write the figures there")
    add_model_options(parser)


def _eval(arguments: argparse.Namespace) -> int:
    """Say how well a model predicts a set that it has not seen."""
    from moe_train.inference import EvaluateJob, evaluate, table_of

    data = [d for d in arguments.data if Path(d).exists() or not OVERRIDE.match(d)]
    arguments.overrides += [d for d in arguments.data if d not in data]
    figures = evaluate(
        EvaluateJob(
            checkpoint=arguments.checkpoint,
            data=tuple(data),
            kind=arguments.kind,
            content_field=arguments.field,
            sequence_length=arguments.sequence_length,
            batch_size=arguments.batch_size,
            model=model_options_of(arguments),
        )
    )
    if figures is not None:
        print(table_of(figures), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


EVAL = Command(name="eval", text="measure a model on a set", add=_add_eval, run=_eval)
"""Its options and what it runs."""
