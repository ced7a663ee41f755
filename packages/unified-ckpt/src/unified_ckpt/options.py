"""What a save excludes or keeps sharded, and what a load takes instead; Paddle's option names.

Each option says what it does to which part. Parts are `model`, `optimizer`, `master_weights` (fp32
copies of parameters, under the parameters' own keys) and any others that a caller saves.

    save(state, checkpoint_id="run/checkpoint-10", options=SaveOptions(skip_save_model_weight=True))
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.geometry.layouts import Layout
from unified_ckpt.plans import DEFAULT_MAX_SHARD_BYTES

MODEL, OPTIMIZER, MASTER_WEIGHTS = "model", "optimizer", "master_weights"
_PER_RANK = ("layout", "ignored_keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How `save` turns a state into stored tensors; the same on every rank, but for `layout`.

    Attributes:
        layout: boxes of plain tensors by key, or a function (see `Layout`); tensors that it does
            not know are whole.
        tied: alias key -> the key under which the tied tensor is stored; aliases are not written,
            in any part, and loads fill them too. See `find_tied_keys`.
        ignored_keys: regular expressions; tensors and values in whose key one is found
            (`re.search`) are not saved.
        skip_save_model_weight: do not write a tensor of `model` that `master_weights` holds too.
            Loads then take it from there, cast to the destination's dtype.
        remove_master_weight: do not write `master_weights`; a load with
            `master_weight_compatible` makes them from the model's weights.
        ignore_merge_optimizer: every box of `optimizer` and `master_weights` becomes a stored
            tensor of its own, `KEY@0:4,8:16@4,16` (box, then whole shape), in a file of one rank,
            so that no two ranks write to one file. Loads under any layout find them.
        gather_split_param: True stores parameters that are split into flat ranges as whole tensors
            (nothing is communicated: each rank writes its ranges into place). False does to their
            optimizer states and master weights what `ignore_merge_optimizer` does to all.
        moment_compression: `int8` stores the moments of `optimizer` (`KEY/moment1` or
            `KEY/exp_avg`, `KEY/moment2` or `KEY/exp_avg_sq`) in one byte an element; see
            `state.compression` for the bound of the error.
        max_shard_bytes: most bytes of tensors in one file, unless one tensor is larger.
        files_over_nodes: let ranks of several machines write to one file, each its own bytes. False
            stores the boxes of a tensor that no machine holds all of as tensors of their own, as
            `ignore_merge_optimizer` does; loads find them, transformers does not (`export_model`
            makes them whole). True is for file systems that keep the bytes of several writers
            apart, as Lustre does and NFS does not.
    """

    layout: Layout | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    skip_save_model_weight: bool = False
    remove_master_weight: bool = False
    ignore_merge_optimizer: bool = False
    gather_split_param: bool = True
    moment_compression: Literal["none", "int8"] = "none"
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    files_over_nodes: bool = False

    def __post_init__(self) -> None:
        _check_patterns(self.ignored_keys)
        _check_tied(self.tied)
        if self.skip_save_model_weight and self.remove_master_weight:
            raise CheckpointValueError(
                "skip_save_model_weight and remove_master_weight together would save no weights; "
                "choose one"
            )
        if self.moment_compression not in ("none", "int8"):
            raise CheckpointValueError(
                f"moment_compression={self.moment_compression!r}; expected 'none' or 'int8'"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what all ranks must agree about, as JSON types."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in _PER_RANK}
        return fields | {"tied": dict(self.tied), "max_shard_bytes": int(self.max_shard_bytes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `load` takes where a checkpoint does not hold a tensor under its own key and part.

    Whatever the save options were, a load finds it by itself; nothing here repeats them.

    Attributes:
        layout: as in `SaveOptions`, for the state that is filled.
        tied: alias key -> stored key, for checkpoints that were saved elsewhere; those of the
            checkpoint itself are known.
        ignored_keys: regular expressions; tensors and values in whose key one is found
            (`re.search`) are left as they are.
        master_weight_compatible: a tensor of `master_weights` that the checkpoint lacks is made
            from the one of `model`, cast to the destination's dtype.
        remove_master_weight: make all of `master_weights` so, also those that are stored.
        group: the ranks that load together, for example `torch.distributed.group.WORLD`; the load
            is collective over it then: all of them read the same checkpoint also if it is replaced
            meanwhile, and what one raises, all raise. None: this rank reads alone.
        timeout_s: bound on each wait for the ranks of `group`.
    """

    layout: Layout | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    master_weight_compatible: bool = False
    remove_master_weight: bool = False
    group: dist.ProcessGroup | None = None
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        _check_patterns(self.ignored_keys)
        _check_tied(self.tied)


def base_key(key: str) -> str:
    """Return the parameter's key of an optimizer state's: `w/moment1` belongs to `w`."""
    return key.partition("/")[0]


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that says whether one of the regular expressions is found in a key."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda key: any(pattern.search(key) for pattern in compiled)


def _check_patterns(patterns: tuple[str, ...]) -> None:
    check_type("ignored_keys, a tuple of regular expressions,", patterns, tuple, list)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointValueError(
                f"ignored_keys: {pattern!r} is no regular expression: {error}"
            ) from error


def _check_tied(tied: Mapping[str, str]) -> None:
    check_type("tied", tied, Mapping)
    for alias, key in tied.items():
        if key in tied:
            raise CheckpointValueError(
                f"tied: {alias!r} stands for {key!r}, which is an alias itself; name the stored key"
            )
