"""The command `moe-train generate`."""

import argparse
from pathlib import Path

from moe_train.commands.options import Command


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", type=Path, required=True)
    add("--prompt", metavar="TEXT", required=True, help="how the text begins")
    add("--max-new-tokens", metavar="N", type=int, default=64, help="default 64")
    text = "0 takes the likeliest token each time; default 0.8"
    add("--temperature", metavar="T", type=float, default=0.8, help=text)
    text = "choose among the K likeliest tokens, 0 among all; default 50"
    add("--top-k", metavar="K", type=int, default=50, help=text)
    add("--seed", metavar="S", type=int, default=0, help="default 0")


def _generate(arguments: argparse.Namespace) -> int:
    """Print the prompt and what a trained model makes of it."""
    from moe_train.jobs import generate_text

    text = generate_text(
        arguments.checkpoint,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(text)
    return 0


GENERATE = Command(
    name="generate", text="print text from a model", add=_add_generate, run=_generate
)
