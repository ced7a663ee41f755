"""The options of commands that use a checkpoint: where the model runs, and how a text goes on."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_train.config import ParallelConfig
from moe_train.errors import TrainValueError

if TYPE_CHECKING:
    from moe_train.generation import GenerationOptions, ModelOptions

_AXES = ("pp", "dp", "ep")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Device, dtype and layout; the layout also as `parallel.ep=2`, as for training."""
    add = parser.add_argument_group("where the model runs").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of weights and activations; default: the checkpoint's")
    add("--pp", metavar="N", type=int, help="pipeline stages; also parallel.pp=N")
    add("--dp", metavar="N", type=int, help="replicas; also parallel.dp=N")
    add("--ep", metavar="N", type=int, help="ranks that share the experts; also parallel.ep=N")
    parser.set_defaults(overrides=[])


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Those of `GenerationOptions`."""
    add = parser.add_argument_group("how the text goes on").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=64, help="default 64")
    text = "0, the default, takes the likeliest token each time"
    add("--temperature", metavar="T", type=float, default=0.0, help=text)
    text = "choose among the K likeliest tokens; default 0: all"
    add("--top-k", metavar="K", type=int, default=0, help=text)
    text = "choose among the likeliest tokens of probability P together; default 1: all"
    add("--top-p", metavar="P", type=float, default=1.0, help=text)
    text = "leave out tokens below this fraction of the likeliest one's probability; default 0"
    add("--min-p", metavar="P", type=float, default=0.0, help=text)
    text = "make tokens that are there already less likely, above 1; default 1"
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help=text)
    add("--seed", metavar="S", type=int, default=0, help="default 0")
    text = "end before this text; may be given several times"
    add("--stop", metavar="TEXT", action="append", default=[], help=text)


def model_options_of(arguments: argparse.Namespace) -> "ModelOptions":
    """What `add_model_options` has read."""
    from moe_train.generation import ModelOptions

    parallel = layout_of(arguments.overrides, {name: getattr(arguments, name) for name in _AXES})
    return ModelOptions(device=arguments.device, dtype=arguments.dtype, parallel=parallel)


def generation_options_of(
    arguments: argparse.Namespace, num_return_sequences: int = 1
) -> "GenerationOptions":
    """What `add_sampling_options` has read."""
    from moe_train.generation import GenerationOptions

    names = (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "seed",
    )
    given = {name: getattr(arguments, name) for name in names}
    stop = tuple(arguments.stop)
    return GenerationOptions(**given, stop=stop, num_return_sequences=num_return_sequences)


def layout_of(overrides: Sequence[str], given: Mapping[str, int | None]) -> ParallelConfig:
    """The layout of `parallel.NAME=N` and of options, which are stronger.

    Raises:
        ValueError: another key, or no number.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        name, _, value = (part.strip() for part in text.partition("="))
        axis = name.removeprefix("parallel.")
        if name == axis or axis not in (*_AXES, "timeout_s"):
            raise TrainValueError(
                f"{text!r}: only parallel.pp, parallel.dp, parallel.ep and parallel.timeout_s can "
                "be set here"
            )
        try:
            values[axis] = float(value) if axis == "timeout_s" else int(value)
        except ValueError as error:
            raise TrainValueError(f"{text!r}: expected a number, as in parallel.ep=2") from error
    values.update({name: value for name, value in given.items() if value is not None})
    return ParallelConfig(**values)
