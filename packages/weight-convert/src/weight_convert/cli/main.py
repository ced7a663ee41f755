"""The command `weight-convert`: convert, verify and inspect model directories, print specs.

    weight-convert convert Qwen3-30B-A3B fused --to fused --dry-run
    weight-convert convert Qwen3-30B-A3B fused --to fused
    weight-convert verify Qwen3-30B-A3B fused
    weight-convert inspect fused
    weight-convert specs --check fused
    weight-convert dequantize DeepSeek-V3 plain
    weight-convert quantize plain again
    weight-convert merge ties.toml merged
    weight-convert lora Qwen3-30B-A3B my-lora merged
    weight-convert lora Qwen3-30B-A3B my-finetuned my-lora --extract 16
    weight-convert upcycle Qwen3-8B Qwen3-8B-MoE --experts 8 --top-k 2

Exit status: 0 done (equal, explained), 1 the directories differ or a tensor is not explained, 2 an
error, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from weight_convert.cli.convert import add_convert
from weight_convert.cli.inspect import add_inspect
from weight_convert.cli.lora import add_lora
from weight_convert.cli.merge import add_merge
from weight_convert.cli.quantize import add_dequantize, add_quantize
from weight_convert.cli.specs import add_specs
from weight_convert.cli.split import add_join, add_split
from weight_convert.cli.upcycle import add_upcycle
from weight_convert.cli.verify import add_verify
from weight_convert.errors import WeightConvertError

_COMMANDS = (
    add_convert,
    add_verify,
    add_inspect,
    add_specs,
    add_quantize,
    add_dequantize,
    add_merge,
    add_lora,
    add_upcycle,
    add_split,
    add_join,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="weight-convert",
        description="Convert MoE checkpoints between the formats of their family, bit for bit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (WeightConvertError, OSError) as error:
        print(f"weight-convert: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        keeps = getattr(args, "resume", False) or getattr(args, "move", False)
        left = "go on with --resume" if keeps else "no output was left"
        print(f"weight-convert: interrupted; {left}", file=sys.stderr)
        return 130
    return status
