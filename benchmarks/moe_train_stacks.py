"""A training step of four ranks against what torch itself puts together for the same decoder.

Four gloo processes, one thread each, train one decoder on the same tokens, in turn:

- pipeline: moe-train with `pp=2, ep=2`, against `torch.distributed.pipelining`'s 1F1B over the same
  layers, with `DistributedDataParallel` for what the ranks of a stage have in common.
- tensor: moe-train with `dp=2, ep=2, tp=2, sharding=3`, against a decoder of DTensor's tensor and
  sequence parallelism (experts cut by their width, vocabulary-parallel loss) under `fully_shard`,
  as torchtitan composes them, over the same two ranks and two replicas.

Both sides clip by the norm over all ranks and take a step of torch's fused AdamW. The losses of the
first step, from the same weights, are compared first.

    python benchmarks/moe_train_stacks.py [pipeline|tensor] [--rounds 15]
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from mesh_spmd import ProcessMesh
from moe_train.config import Config, load_config
from moe_train.data import Batch
from moe_train.jobs.rank_alone import random_batches
from moe_train.layout import parameter_layouts, stage_tensors, stored_tensors
from moe_train.model import DecoderConfig, DecoderStage, StageOptions, initialise
from moe_train.parallel import Parallel, start
from moe_train.training import build_runner, build_stages, read_model_config
from ranktest import run_ranks

RANKS, WARM, LR = 4, 3, 1e-3
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
JOB = """
model.config_file = "config.json"
data = { corpus = ["text"], extensions = [".txt"], sequence_length = 256 }
tokenizer.vocab_size = 300
optimizer = { lr = 1e-3, weight_decay = 0.0, beta1 = 0.9, beta2 = 0.999, max_grad_norm = 1.0 }
parallel.timeout_s = 300
log = { tensorboard = false, plots = false, progress = "off" }
[train]
output_dir = "run"
max_steps = 20
global_batch_size = 16
gradient_accumulation_steps = 4
device = "cpu"
"""
LAYOUTS = {
    "pipeline": {"pp": 2, "ep": 2},
    "tensor": {"dp": 2, "ep": 2, "tp": 2, "sharding": 3},
}


class TorchStep:
    """What both peers have in common: the optimizer, and the norm over all ranks.

    Args:
        copies: how many ranks hold each parameter, or rather the same part of it.
    """

    def __init__(self, copies: dict[nn.Parameter, int]) -> None:
        self.copies = copies
        self.optimizer = torch.optim.AdamW(copies, lr=LR, weight_decay=0.0, fused=True)

    def update(self) -> None:
        total = torch.zeros(())
        for parameter, copies in self.copies.items():
            if parameter.grad is not None:
                total += local(parameter.grad).square().sum() / copies
        dist.all_reduce(total)
        factor = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(p.grad) for p in self.copies if p.grad is not None], factor)
        self.optimizer.step()
        self.optimizer.zero_grad()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TorchPipeline:
    """The same stages, driven by torch."""

    def __init__(self, config: Config, model: DecoderConfig, parallel: Parallel) -> None:
        (self.stage,) = build_stages(config, model, parallel).by_number.values()
        weights = initial_weights(model)
        with torch.no_grad():
            for name, parameter in self.stage.named_parameters():
                whole, ep = weights[name], parallel.ep_group
                own = whole.chunk(ep.size())[ep.rank()] if ".experts." in name else whole
                parameter.copy_(own)
        experts = [name for name, _ in self.stage.named_parameters() if ".experts." in name]
        wrapped = _StageForTorch(self.stage)
        wrapped_experts = [f"stage.{name}" for name in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            wrapped, wrapped_experts
        )
        ddp = DistributedDataParallel(wrapped, process_group=parallel.data_group)
        ranks = [parallel.rank % 2, parallel.rank % 2 + 2]
        groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
        stage = PipelineStage(
            ddp, ranks.index(parallel.rank), 2, torch.device("cpu"), group=groups[parallel.rank % 2]
        )
        self.schedule = Schedule1F1B(
            stage,
            config.train.gradient_accumulation_steps,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.parallel = parallel
        named = self.stage.named_parameters()
        self.step = TorchStep({p: 1 if name in experts else 2 for name, p in named})
        self.count = config.train.global_batch_size * config.data.sequence_length

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # DistributedDataParallel takes the mean over the two ranks.
        return loss * 2 / self.count

    def train(self, batches: Sequence[Batch]) -> float:
        losses: list[Tensor] = []
        if self.parallel.is_first:
            self.schedule.step(torch.cat([b.input_ids for b in batches]), return_outputs=False)
        else:
            labels = torch.cat([b.labels for b in batches])
            self.schedule.step(target=labels, losses=losses, return_outputs=False)
        for name, parameter in self.stage.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)
        total = torch.stack(losses).sum().detach() / 2 if losses else torch.zeros(())
        dist.all_reduce(total)
        self.step.update()
        return total.item()


class _StageForTorch(nn.Module):
    """A stage as a function of one tensor; the last one returns logits."""

    def __init__(self, stage: DecoderStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        hidden, _ = self.stage.hidden_states(x, positions)
        return self.stage.logits(hidden) if self.stage.options.last else hidden


def initial_weights(model: DecoderConfig) -> dict[str, Tensor]:
    """Those of moe-train's job, of the whole decoder."""
    layers = range(model.num_hidden_layers)
    stage = DecoderStage(model, StageOptions(layers=layers, first=True, last=True))
    layouts = parameter_layouts(stage, model, ProcessMesh((1, 1), ("dp", "ep")))
    weights = stage_tensors(stage)
    stored = stored_tensors(layouts, weights, 0)
    for shard in stored.shards:
        initialise(shard.key, shard.tensor, seed=0, std=model.initializer_range)
    stored.write_back()
    return weights


class Attention(nn.Module):
    """Of the heads of this rank, once its projections are cut."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        d, h = model["hidden_size"], model["head_dim"]
        self.h, kv = h, model["num_key_value_heads"]
        self.q_proj = nn.Linear(d, model["num_attention_heads"] * h, bias=False)
        self.k_proj = nn.Linear(d, kv * h, bias=False)
        self.v_proj = nn.Linear(d, kv * h, bias=False)
        self.o_proj = nn.Linear(model["num_attention_heads"] * h, d, bias=False)
        self.q_norm = nn.RMSNorm(h, eps=model["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(h, eps=model["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.h)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotated(self.q_norm(q), cos, sin).transpose(1, 2)
        k = rotated(self.k_norm(k), cos, sin).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Experts(nn.Module):
    """Each rank has all experts with a part of their width."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        e, d, i = model["num_experts"], model["hidden_size"], model["moe_intermediate_size"]
        self.k = model["num_experts_per_tok"]
        self.gate = nn.Linear(d, e, bias=False)
        self.w1 = nn.Parameter(torch.empty(e, i, d))
        self.w3 = nn.Parameter(torch.empty(e, i, d))
        self.w2 = nn.Parameter(torch.empty(e, d, i))

    def forward(self, x_BSd: DTensor) -> Tensor:
        # Of outputs that are parts of sums each rank has parts of gradients.
        part = [Partial()]
        x = x_BSd.to_local(grad_placements=part).flatten(0, 1)
        gate = self.gate.weight.to_local(grad_placements=part)
        weights, chosen = F.linear(x, gate).softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=self.w1.shape[0])
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // self.k]
        w1, w2, w3 = (local(w).transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        inner = F.silu(torch._grouped_mm(rows, w1, ends)) * torch._grouped_mm(rows, w3, ends)
        out = torch._grouped_mm(inner, w2, ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, out).view(x_BSd.shape)


class Layer(nn.Module):
    """Attention and experts, each with its norm and residual."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        eps = model["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(model["hidden_size"], eps=eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model["hidden_size"], eps=eps)
        self.mlp = Experts(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Of token ids, vocabulary logits."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model["vocab_size"], model["hidden_size"])
        self.layers = nn.ModuleList(Layer(model) for _ in range(model["num_hidden_layers"]))
        self.norm = nn.RMSNorm(model["hidden_size"], eps=model["rms_norm_eps"])
        self.lm_head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


class TorchTensor:
    """A decoder of DTensors under `fully_shard`."""

    def __init__(self, config: Config, model: DecoderConfig, parallel: Parallel) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.decoder = Decoder(MODEL)
        load_weights(self.decoder, model)
        cut_by_tensor(self.decoder, mesh["tp"])
        for layer in self.decoder.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.decoder, mesh=mesh["dp"])
        self.decoder.set_gradient_divide_factor(1.0)
        # gloo has no sum with a factor.
        self.decoder.set_force_sum_reduction_for_comms(True)
        self.step = TorchStep({p: copies_of(p) for p in self.decoder.parameters()})
        self.count = config.train.global_batch_size * config.data.sequence_length
        self.dp_group = mesh["dp"].get_group()
        h = MODEL["head_dim"]
        frequencies = MODEL["rope_theta"] ** (-torch.arange(0, h, 2).float() / h)
        angles = torch.arange(config.data.sequence_length)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        self.cos, self.sin = angles.cos(), angles.sin()

    def train(self, batches: Sequence[Batch]) -> float:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            self.decoder.set_is_last_backward(number == len(batches) - 1)
            with loss_parallel():
                logits = self.decoder(batch.input_ids, self.cos, self.sin)
                loss = F.cross_entropy(
                    logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
                )
                (loss / self.count).backward()
            total += local(loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        total /= self.count
        dist.all_reduce(total, group=self.dp_group)
        self.step.update()
        return total.item()


def copies_of(parameter: nn.Parameter) -> int:
    """How many ranks hold the same part."""
    if not isinstance(parameter, DTensor):
        return RANKS
    mesh, placements = parameter.device_mesh, parameter.placements
    held = math.prod(
        mesh.size(dim) for dim, place in enumerate(placements) if not place.is_replicate()
    )
    return RANKS // held


def cut_by_tensor(decoder: Decoder, tp: DeviceMesh) -> None:
    """Tensor and sequence parallelism over the ranks of `tp`."""
    sequence = SequenceParallel(sequence_dim=1)
    whole = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    parallelize_module(
        decoder,
        tp,
        {
            "embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "norm": sequence,
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    for layer in decoder.layers:
        mlp = layer.mlp
        for name, dim in (("w1", 1), ("w3", 1), ("w2", 2)):
            cut = distribute_tensor(getattr(mlp, name).data, tp, [Shard(dim)])
            mlp.register_parameter(name, nn.Parameter(cut))
        gate = distribute_tensor(mlp.gate.weight.data, tp, [Replicate()])
        mlp.gate.register_parameter("weight", nn.Parameter(gate))
        parallelize_module(
            layer,
            tp,
            {
                "input_layernorm": sequence,
                "post_attention_layernorm": sequence,
                "self_attn": whole,
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.q_norm": heads,
                "self_attn.k_norm": heads,
                "self_attn.o_proj": RowwiseParallel(
                    output_layouts=Shard(1), use_local_output=False
                ),
                "mlp": PrepareModuleInputOutput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                    use_local_input=False,
                    output_layouts=(Partial(),),
                    desired_output_layouts=(Shard(1),),
                    use_local_output=False,
                ),
            },
        )


def load_weights(decoder: Decoder, model: DecoderConfig) -> None:
    given = {name.removeprefix("model."): w for name, w in initial_weights(model).items()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(("w1", "w3")):
                fused = given[name[:-2] + "experts.gate_up_proj"]
                value = fused.chunk(2, dim=1)[name.endswith("w3")]
            else:
                value = given[name.replace("mlp.w2", "mlp.experts.down_proj")]
            parameter.copy_(value)


PEERS: dict[str, Callable[..., Any]] = {"pipeline": TorchPipeline, "tensor": TorchTensor}


def measured(config: Config, name: str, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    model, parallel = read_model_config(config), start(config)
    runner, checkpointer = build_runner(config, model, parallel, {})
    batches = random_batches(config, model.vocab_size, parallel)
    peer = PEERS[name](config, model, parallel)
    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: runner.train(batches, lr=LR).loss,
        "torch": lambda: peer.train(batches),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(WARM + rounds):
        losses = []
        for way in sorted(ways, reverse=number % 2 == 1):
            dist.barrier()
            began = time.perf_counter()
            losses.append(ways[way]())
            dist.barrier()
            if number >= WARM:
                found[way].append(time.perf_counter() - began)
        if number < WARM and not math.isclose(*losses, rel_tol=1e-4):
            raise RuntimeError(f"step {number}: losses of ours and torch's: {sorted(losses)}")
    checkpointer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-train-stacks-") as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        Path(folder, "job.toml").write_text(JOB, encoding="utf-8")
        for name in options.which:
            layout = [f"parallel.{key}={value}" for key, value in LAYOUTS[name].items()]
            config = load_config(Path(folder, "job.toml"), layout)
            run = partial(measured, config, name, options.rounds)
            ranks: list[Any] = run_ranks(lambda *_, run=run: run(), RANKS, timeout_s=1200)
            report(name, ranks[0])


def report(name: str, found: dict[str, list[float]]) -> None:
    ratios = sorted(a / b for a, b in zip(found["ours"], found["torch"], strict=True))
    line = {
        "figure": f"moe_train_stack_{name}",
        "value": round(statistics.median(ratios), 3),
        "unit": "x",
        "low": round(ratios[0], 3),
        "high": round(ratios[-1], 3),
        "n": len(ratios),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
