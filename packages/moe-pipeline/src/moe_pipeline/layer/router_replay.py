"""Router replay: the expert choices of one pass, kept as data, forced on another pass.

What two programs compute for the same tokens differs in rounding, and rounding decides near-ties.
Where their numbers are to be compared (a policy and its sampler, a run and its repetition, a fast
kernel and its reference), the second is given the choices of the first. It computes its own
logits, weights and losses, so its router learns.

Invariant: a replayed pass makes exactly the recorded calls, layer by layer, each with as many
tokens; anything else is an error and never a partial replay.

    with record_routing(model) as choices:
        model(x)
    safetensors.torch.save_file(choices, path)      # or torch.save

    with replay_routing(model, safetensors.torch.load_file(path)):
        loss_of(model(x)).backward()

Choices are those of this rank's tokens, in their order, so in another layout they are split and
concatenated (dim 0) as the tokens are. A choice that a capacity dropped is recorded as none (-1),
so the balancing loss of the replay counts the rows that were kept.
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.layer.moe_layer import MoELayer, MoEOutput
from moe_pipeline.recomputation import is_replaying


@contextmanager
def record_routing(module: nn.Module) -> Generator[dict[str, Tensor], None, None]:
    """Record the choices of every `MoELayer` in `module` while the context is open.

    A recompute is not recorded again, if it is one of `moe_pipeline.recompute`. Not collective. The
    layers are watched in every thread.

    Yields:
        A dict that fills up: under "<name of the layer>.<number of its call, from 0>" the choices
        int64 [T, K] of that call, on the layer's device. Names are those of
        `module.named_modules()`; if the module is the layer, the key is the number alone.

    Raises:
        ValueError: the module has no MoE layer.
    """
    choices: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, layer in _layers_of(module).items():
            hooks.callback(layer.register_forward_hook(_Recorder(name, choices)).remove)
        yield choices


@contextmanager
def replay_routing(
    module: nn.Module, recorded: Mapping[str, Tensor]
) -> Generator[None, None, None]:
    """Make every `MoELayer` in `module` choose as recorded while the context is open.

    Not collective by itself, but every rank of a layer's groups has to replay if one does. The
    recorded tensors may be on another device.

    Args:
        module: the one that was recorded, or one with layers of the same names.
        recorded: what `record_routing` gave.

    Raises:
        ValueError: layers that the module does not have, or whose calls are missing; choices that
            do not fit the layer or, in a call, its tokens; more calls than recorded, or at the end
            fewer.
        TypeError: choices that are no int64 tensor.
    """
    layers = _layers_of(module)
    calls = _by_layer(recorded, layers)
    players = [_Player(name, layer.config, calls[name]) for name, layer in layers.items()]
    with ExitStack() as hooks:
        for player, layer in zip(players, layers.values(), strict=True):
            handle = layer.register_forward_pre_hook(player, with_kwargs=True)
            hooks.callback(handle.remove)
        yield
    for player in players:
        player.check_finished()


@final
class _Recorder:
    """The forward hook of one layer."""

    def __init__(self, name: str, choices: dict[str, Tensor]) -> None:
        self._name, self._choices, self._num_calls = name, choices, 0

    def __call__(self, layer: nn.Module, args: object, out: MoEOutput) -> None:
        if is_replaying():
            return
        # A copy, which owns all of its memory and nothing else, as safetensors wants it.
        copied = out.topk_idx_TK.detach().clone(memory_format=torch.contiguous_format)
        self._choices[_key(self._name, self._num_calls)] = copied
        self._num_calls += 1


@final
class _Player:
    """The forward pre-hook of one layer; checks the choices when it is made."""

    def __init__(self, name: str, config: MoEConfig, calls: list[Tensor]) -> None:
        self._name, self._calls, self._num_done = name, calls, 0
        for number, topk_idx_TK in enumerate(calls):
            _check_choices(_key(name, number), topk_idx_TK, config)

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_replaying():
            return None  # the layer has its plan
        if self._num_done == len(self._calls):
            raise MoEValueError(
                f"call {self._num_done + 1} of {_quoted(self._name)}, but its record has "
                f"{len(self._calls)}; replay the pass that was recorded"
            )
        x: Tensor = args[0] if args else kwargs["x"]
        topk_idx_TK = self._calls[self._num_done]
        num_tokens = x.shape[:-1].numel()
        if topk_idx_TK.shape[0] != num_tokens:
            raise MoEValueError(
                f"record {_key(self._name, self._num_done)!r} has choices of "
                f"{topk_idx_TK.shape[0]} tokens, but the layer got {num_tokens}, in shape "
                f"{tuple(x.shape)}; give it the tokens that were recorded"
            )
        self._num_done += 1
        return args, {**kwargs, "topk_idx_TK": topk_idx_TK.to(x.device)}

    def check_finished(self) -> None:
        if self._num_done < len(self._calls):
            raise MoEValueError(
                f"{_quoted(self._name)} was called {self._num_done} times, but its record has "
                f"{len(self._calls)}; replay the pass that was recorded"
            )


def _layers_of(module: nn.Module) -> dict[str, MoELayer]:
    layers = {name: each for name, each in module.named_modules() if isinstance(each, MoELayer)}
    if not layers:
        raise MoEValueError(
            f"{type(module).__name__} has no MoELayer whose routing could be replayed"
        )
    return layers


def _by_layer(
    recorded: Mapping[str, Tensor], layers: Mapping[str, MoELayer]
) -> dict[str, list[Tensor]]:
    """The calls of each layer, in order; a record that is not of exactly these is an error."""
    calls: dict[str, list[Tensor]] = {}
    for name in layers:
        calls[name] = []
        while (key := _key(name, len(calls[name]))) in recorded:
            calls[name].append(recorded[key])
        if not calls[name]:
            raise MoEValueError(
                f"the record lacks {key!r}, the first call of {_quoted(name)}; record the same "
                "module that replays"
            )
    known = {_key(name, number) for name in layers for number in range(len(calls[name]))}
    unknown = sorted(set(recorded) - known)
    if unknown:
        raise MoEValueError(
            f"the record has {unknown[:5]}, which is no call of a layer of this module, or "
            f"follows a gap; its layers are {sorted(layers)[:5]}"
        )
    return calls


def _check_choices(key: str, topk_idx_TK: Tensor, config: MoEConfig) -> None:
    if not isinstance(topk_idx_TK, Tensor) or topk_idx_TK.dtype != torch.int64:
        got = getattr(topk_idx_TK, "dtype", type(topk_idx_TK).__name__)
        raise MoETypeError(
            f"record {key!r} is {got}; choices are an int64 tensor [tokens, choices]"
        )
    shape = tuple(topk_idx_TK.shape)
    num_choices = config.num_experts_per_tok
    if config.router.moe_router_selection == "expert_choice":
        num_choices = config.num_experts  # a token may be chosen by all
    if len(shape) != 2 or shape[1] != num_choices:
        raise MoEValueError(
            f"record {key!r} has shape {shape}; the layer needs [tokens, {num_choices}]"
        )
    if shape[0] == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(topk_idx_TK))
    if low < -1 or high >= config.num_experts:
        raise MoEValueError(
            f"record {key!r} names experts from {low} to {high}; the layer has num_experts="
            f"{config.num_experts}, so give 0 to {config.num_experts - 1}, or -1 for none"
        )


def _key(name: str, number: int) -> str:
    return f"{name}.{number}" if name else str(number)


def _quoted(name: str) -> str:
    return f"MoE layer {name!r}" if name else "the MoE layer"
