"""Keys of a job that do nothing, or little, beside its others: each is told in a line.

for line in idle_keys(config, model, device): logger.warning("warning: %s", line)
"""

import json
from collections.abc import Iterator

import torch

from moe_train.config import Config
from moe_train.layout import chosen_names
from moe_train.model import DecoderConfig


def idle_keys(config: Config, model: DecoderConfig, device: torch.device) -> Iterator[str]:
    """A line for each key that is set and has no effect, or little, beside others; pure."""
    train, parallel = config.train, config.parallel
    if train.offload_activations and device.type == "cpu":
        yield (
            "train.offload_activations=true does nothing on the CPU, whose activations are in the "
            "host's memory already"
        )
    if train.offload_optimizer and device.type == "cpu":
        yield (
            "train.offload_optimizer=true saves nothing on the CPU, whose states are in the host's "
            "memory already; they are copied to and fro"
        )
    if train.gradient_accumulation_fusion and train.master_weights:
        yield (
            "train.gradient_accumulation_fusion=true does nothing with train.master_weights=true, "
            "which adds each gradient up in float32"
        )
    elif train.gradient_accumulation_fusion and parallel.sharding > 1:
        yield (
            f"train.gradient_accumulation_fusion=true does little with parallel.sharding="
            f"{parallel.sharding}, which sums gradients of layers after each microbatch"
        )
    yield from _idle_beside(config)
    if parallel.cp_attention == "ring" and all(layout.cp == 1 for layout in parallel.layouts):
        yield 'parallel.cp_attention="ring" does nothing with parallel.cp=1'
    for group in config.param_groups:
        names = chosen_names(f"{group.place}.parameters", group.parameters, model)
        if names.isdisjoint(chosen_names("train.trainable", train.trainable, model)):
            yield f"[{group.place}] does nothing: train.trainable leaves out all it chooses"


def _idle_beside(config: Config) -> Iterator[str]:
    """A line for each key that is not at its default and has no effect without another one."""
    train, moe, checkpoint = config.train, config.moe, config.checkpoint
    optimizer, falls = config.optimizer, config.optimizer.decay != "constant"
    spread = any(layout.ep > 1 for layout in config.parallel.layouts)
    muon = "muon" in (optimizer.name, *(group.algorithm for group in config.param_groups))
    needs = (
        (optimizer, "decay_steps", falls, "a decay"),
        (optimizer, "min_lr_ratio", falls, "a decay"),
        (optimizer, "wsd_decay_style", optimizer.decay == "wsd", 'optimizer.decay="wsd"'),
        (optimizer, "muon_momentum", muon, 'optimizer.name="muon"'),
        (train, "loss_spike_window", train.loss_spike_threshold, "train.loss_spike_threshold"),
        (train, "max_skipped_steps", train.on_loss_spike == "skip", 'train.on_loss_spike="skip"'),
        (moe, "token_drop_policy", moe.capacity_factor, "moe.capacity_factor"),
        (moe, "expert_bias_update_rate", moe.update_expert_bias, "moe.update_expert_bias=true"),
        (moe, "dispatch_route", spread, "parallel.ep above 1"),
        (moe, "dispatch_backend", spread, "parallel.ep above 1"),
        (checkpoint, "ema_interval_steps", checkpoint.ema_decay, "checkpoint.ema_decay"),
        (checkpoint, "node_interval_steps", checkpoint.node_folder, "checkpoint.node_folder"),
        (checkpoint, "node_copies", checkpoint.node_folder, "checkpoint.node_folder"),
    )
    for table, name, other, named in needs:
        value = getattr(table, name)
        if not other and value != table.__dataclass_fields__[name].default:
            yield f"{table.table}.{name}={json.dumps(value)} does nothing without {named}"
    late = [text for text in config.parallel.relayout if int(text.split(":")[0]) >= train.max_steps]
    if late:
        yield f"parallel.relayout={late} is past the last step, train.max_steps={train.max_steps}"
    if config.optimizer.warmup_steps > config.train.max_steps:
        yield (
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} are more than "
            f"train.max_steps={config.train.max_steps}, so the rate never comes to optimizer.lr"
        )
