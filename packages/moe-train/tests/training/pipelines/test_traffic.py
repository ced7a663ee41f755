"""Planned bytes against those that real ranks hand over in one step."""

import contextlib
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm_collectives.call.groups import count_wire_bytes
from moe_pipeline.executor import transport
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.optim import grads
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.pipelines.traffic import step_traffic
from ranktest import run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]


def counted(config: Config, random_batches: Batches) -> dict[str, list[int]]:
    """By kind the bytes that each rank has sent in a step."""

    def run(rank: int, _: int) -> dict[str, int]:
        at = start(config)
        runner, _ = build_runner(config, read_model_config(config), at, {})
        found = dict.fromkeys(("pipeline", "gradients"), 0)
        sharing = contextlib.nullcontext() if at.cp_group is None else count_wire_bytes(at.cp_group)
        send, reduce = transport.isend_tensors, grads.reduce_in_buckets

        def sending(packed: list[torch.Tensor], **how: object) -> object:
            # The header of a message is a tensor of bytes; what it describes follows.
            found["pipeline"] += sum(t.nbytes for t in packed if t.dtype != torch.uint8)
            return send(packed, **how)

        def reducing(
            tensors: list[torch.Tensor], *, group: dist.ProcessGroup, **how: object
        ) -> None:
            size = group.size()
            found["gradients"] += 2 * (size - 1) * sum(t.nbytes for t in tensors) // size
            reduce(tensors, group=group, **how)

        with (
            mock.patch.object(transport, "isend_tensors", sending),
            mock.patch.object(grads, "reduce_in_buckets", reducing),
            count_wire_bytes(at.ep_group) as rows,
            sharing as heads,
        ):
            runner.train(random_batches(config, 0, at.sample_rank, at.num_sample_ranks), lr=0.0)
        found["attention"] = 0 if heads is None else heads.num_wire_bytes
        return {**found, "dispatch": rows.num_wire_bytes}

    ranks = run_ranks(run, config.world_size, timeout_s=120)
    return {kind: [rank[kind] for rank in ranks] for kind in ranks[0]}  # type: ignore[index,attr-defined]


BATCH = "train.global_batch_size=16"
# All experts of a token, so that even routing is what happens.
EVERY = {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}


@pytest.mark.parametrize(
    "keys",
    [
        ("parallel.pp=2", "parallel.ep=2"),
        ("parallel.dp=2", "parallel.ep=2", "moe.dispatch_route=dedup", BATCH),
        ("parallel.pp=2", "parallel.dp=2", "parallel.schedule=zbv", "train.dtype=bfloat16"),
        ("parallel.pp=2", "parallel.ep=2", "parallel.cp=2"),
        ("parallel.dp=3", "parallel.cp=3", "train.recompute=layers"),
        ("parallel.dp=3", "parallel.cp=3", "parallel.cp_attention=ring", "train.dtype=bfloat16"),
        ("parallel.pp=2", "parallel.dp=2", "parallel.cp=2", "data.sequence_length=11"),
    ],
)
def test_planned_bytes_are_those_that_a_step_sends(
    configure: Configure, random_batches: Batches, keys: tuple[str, ...]
) -> None:
    config = configure(*keys, num_hidden_layers=4, num_attention_heads=3, **EVERY)
    seen = counted(config, random_batches)
    for traffic in step_traffic(config, read_model_config(config)):
        sent = seen[traffic.kind]
        if traffic.unknown:
            assert "cp ranks share unevenly" in traffic.unknown
            continue
        # A tensor that the ranks do not divide goes in parts that differ by an element.
        assert traffic.busiest_bytes == pytest.approx(max(sent), rel=0.01), traffic.kind
        assert traffic.total_bytes == pytest.approx(sum(sent), rel=0.01), traffic.kind
        assert (traffic.total_bytes > 0) == (max(sent) > 0), traffic.kind


def test_a_change_of_layout_sends_the_weights_and_moments_that_change_ranks(
    configure: Configure,
) -> None:
    config = configure("parallel.ep=2", 'parallel.relayout=["2: dp=2", "3: dp=2"]', num_experts=4)
    model = read_model_config(config)
    *_, spread, same = step_traffic(config, model)
    layers, widths = model.num_hidden_layers, model.moe.moe_intermediate_size * model.hidden_size
    half = layers * 2 * 3 * widths * 4  # two of four experts, three matrices of each, float32
    assert spread.kind == "relayout after step 2"
    assert (spread.busiest_bytes, spread.total_bytes) == (3 * half, 6 * half), "and two moments"
    assert (same.busiest_bytes, same.total_bytes) == (0, 0)


def test_what_cannot_be_planned_says_why(configure: Configure) -> None:
    config = configure("parallel.ep=2", 'parallel.expert_parts=["2,4"]', num_experts=6)
    dispatch, *_ = step_traffic(config, read_model_config(config))
    assert "uneven experts" in dispatch.unknown and math.isclose(dispatch.total_bytes, 0)
