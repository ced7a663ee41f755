"""Planned bytes against those that real ranks hand over in one step."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_pipeline.executor import transport
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.optim import grads
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.pipelines.traffic import step_traffic
from moe_train.training.sent_bytes import sent_bytes
from ranktest import run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]


def counted(config: Config, random_batches: Batches) -> dict[str, list[int]]:
    """By kind the bytes that each rank has sent in a step."""
    config = replace(config, log=replace(config.log, sent_bytes=True))

    def run(rank: int, _: int) -> dict[str, int]:
        at = start(config)
        runner, _ = build_runner(config, read_model_config(config), at, {})
        found = dict.fromkeys(("pipeline", "gradients"), 0)
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
            sent_bytes(config, at) as sent,
        ):
            runner.train(random_batches(config, 0, at.sample_rank, at.num_sample_ranks), lr=0.0)
        shared = {name.removeprefix("sent_bytes/"): count for name, count in sent.items()}
        return {**found, **shared}  # type: ignore[dict-item]

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
    compare(configure(*keys, num_hidden_layers=4, num_attention_heads=3, **EVERY), random_batches)


LATENT = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GROUPED = {**EVERY, "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_only_layers": [1]}


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (("parallel.dp=2", "parallel.ep=2", "parallel.tp=2"), GROUPED),
        (("parallel.dp=4", "parallel.tp=4", "train.recompute=layers"), GROUPED),
        (("parallel.ep=4", "parallel.cp=2", "parallel.tp=2", "data.sequence_length=11"), GROUPED),
        (("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "train.recompute=selective"), LATENT),
        (("parallel.ep=4", "parallel.cp=2", "parallel.tp=2", "train.recompute=outputs"), LATENT),
        (
            ("parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "train.loss_chunk_tokens=5"),
            {**LATENT, "num_nextn_predict_layers": 2, "vocab_size": 303},
        ),
    ],
)
def test_planned_bytes_of_ranks_that_share_heads_are_those_that_a_step_sends(
    configure: Configure,
    random_batches: Batches,
    keys: tuple[str, ...],
    model: dict[str, object],
) -> None:
    compare(configure(*keys, **{"num_hidden_layers": 4, **model}), random_batches)


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (("parallel.dp=2", "parallel.ep=2", "parallel.etp=2"), GROUPED),
        (("parallel.dp=4", "parallel.etp=4", "train.recompute=layers"), GROUPED),
        (("parallel.pp=2", "parallel.dp=2", "parallel.etp=2", "train.dtype=bfloat16"), LATENT),
        (
            (
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.tp=2",
                "parallel.etp=2",
                "train.recompute=selective",
            ),
            LATENT,
        ),
        (
            (
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.cp=2",
                "parallel.etp=2",
                "data.sequence_length=11",
                "train.recompute=outputs",
                'parallel.expert_parts=["1,3"]',
            ),
            GROUPED,
        ),
    ],
)
def test_planned_bytes_of_ranks_that_share_experts_are_those_that_a_step_sends(
    configure: Configure,
    random_batches: Batches,
    keys: tuple[str, ...],
    model: dict[str, object],
) -> None:
    compare(configure(*keys, BATCH, **{"num_hidden_layers": 4, **model}), random_batches)


def compare(config: Config, random_batches: Batches) -> None:
    """What is planned with what is counted."""
    seen = counted(config, random_batches)
    for traffic in step_traffic(config, read_model_config(config)):
        sent = seen[traffic.kind]
        if traffic.unknown:
            reasons = ("ranks share unevenly", "recomputed", "uneven experts")
            assert any(reason in traffic.unknown for reason in reasons)
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


def test_an_embedding_of_two_stages_is_summed_over_the_ranks_with_the_same_rows(
    configure: Configure,
) -> None:
    """Of 303 rows 8 ranks sum all, or each 4 of them half: as many bytes less."""

    def sent(tp: int, is_tied: bool) -> int:
        keys = ("parallel.pp=2", "parallel.dp=4", f"parallel.tp={tp}")
        model = {"vocab_size": 303, "num_attention_heads": 2, "tie_word_embeddings": is_tied}
        config = configure(*keys, "train.global_batch_size=16", **model)
        traffic = {t.kind: t for t in step_traffic(config, read_model_config(config))}
        return traffic["gradients"].total_bytes

    row = 32 * 4  # float32
    assert sent(1, True) - sent(1, False) == row * 303 * 2 * (7 - 2 * 3)
    assert sent(2, True) - sent(2, False) == row * 303 * 2 * (3 - 2 * 1)


def test_what_cannot_be_planned_says_why(configure: Configure) -> None:
    config = configure("parallel.ep=2", 'parallel.expert_parts=["2,4"]', num_experts=6)
    dispatch, *_ = step_traffic(config, read_model_config(config))
    assert "uneven experts" in dispatch.unknown and math.isclose(dispatch.total_bytes, 0)
