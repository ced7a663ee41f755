"""Models as transformers loads them from directories: an opinion in which no spec has a say.

A spec that is wrong in both directions agrees with itself; transformers' loader does not agree with
it. Quantised weights are dequantised by transformers, so fp8 compares with bfloat16.

    compare_models(Path("a"), Path("b"), logits=False, quantised=False).differences

Invariant: a parameter that transformers finds no weights for, and so makes up, is a difference.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from weight_convert.errors import WeightConvertError
from weight_convert.opinions.numbers import unequal
from weight_convert.opinions.opinion import Opinion

_NUM_TOKENS = 16
_SCALES = ("_scale_inv", "_scales")


def compare_models(a: Path, b: Path, *, logits: bool, quantised: bool) -> Opinion:
    """What `second_opinion` promises."""
    dtype = "auto" if quantised else torch.float32  # codes stand for numbers of config.json's dtype
    with _quiet():
        (model_a, left_a), (model_b, left_b) = _load(a, dtype), _load(b, dtype)
    differences = _differences(model_a, model_b)
    difference = largest = None
    if logits and not differences:
        difference, largest = _logit_difference(model_a, model_b)
    return Opinion(
        version=transformers.__version__,
        num_tensors=len(model_a.state_dict().keys() | model_b.state_dict().keys()),
        differences=differences,
        not_loaded=tuple(sorted(left_a | left_b)),
        max_logit_difference=difference,
        largest_logit=largest,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars and reports: what was not loaded is said by our own."""
    log: Any = logging  # which has no annotations
    verbosity, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if has_bars:
            log.enable_progress_bar()


def _load(directory: Path, dtype: torch.dtype | str) -> tuple[Any, set[str]]:
    """A model, and the stored tensors that transformers left out.

    Raises:
        WeightConvertError: transformers cannot load it, makes parameters up, or leaves scales out.
    """
    try:
        loader = _loader(directory)
        model, info = loader.from_pretrained(
            directory,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise WeightConvertError(
            f"transformers {transformers.__version__} cannot load {directory}: {error}; compare at "
            f"level bytes, or convert it to a format that transformers reads"
        ) from error
    made_up = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if made_up:
        raise WeightConvertError(
            f"transformers {transformers.__version__} finds no weights of the right shape for "
            f"{len(made_up)} parameters in {directory}, for example {made_up[0]}; compare at "
            "level bytes, or convert it to format transformers or fused"
        )
    left_out = set(info["unexpected_keys"])
    scales = sorted(key for key in left_out if key.endswith(_SCALES))
    if scales:
        raise WeightConvertError(
            f"transformers {transformers.__version__} loads {directory} without {scales[0]}, so "
            f"its codes are no weights; convert it to format transformers, or dequantize it"
        )
    return model.eval(), left_out


def _loader(directory: Path) -> Any:  # since its declared return forgets `info`
    """Transformers' class for models with a language head, of text alone or behind images."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _differences(a: Any, b: Any) -> dict[str, str]:
    left, right = a.state_dict(), b.state_dict()
    found: dict[str, str] = {}
    for key in sorted(left.keys() | right.keys()):
        if key not in left or key not in right:
            found[key] = f"only in the {'second' if key not in left else 'first'} model"
        elif left[key].shape != right[key].shape:
            found[key] = f"loaded as {list(left[key].shape)} against {list(right[key].shape)}"
        else:
            number = unequal(left[key], right[key])
            if number is not None:
                found[key] = (
                    f"numbers that transformers loads differ from element {number} of "
                    f"{left[key].numel()} on"
                )
    return found


def _logit_difference(a: Any, b: Any) -> tuple[float, float]:
    """The greatest difference of the logits of one sequence in float32, and the greatest logit."""
    vocab_size = a.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(_NUM_TOKENS)[None] * 7919 % vocab_size
    with torch.no_grad():
        left, right = (model.float()(input_ids=tokens).logits for model in (a, b))
    return float((left - right).abs().max()), float(left.abs().max())
