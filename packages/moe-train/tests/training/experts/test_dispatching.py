"""The keys of `[moe]` that say how tokens travel, in real steps."""

from collections.abc import Callable

import pytest

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, check_layout, read_model_config
from moe_train.training.experts.dispatching import dispatch_options
from ranktest import run_ranks

Configure = Callable[..., Config]
Batches = Callable[..., list[Batch]]

SHARED = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "shared_expert_intermediate_size": 8,
    "router_aux_loss_coef": 0.05,
}
WAYS = {
    "direct": (),
    "nodes of two": ("moe.dispatch_route=hierarchical", "moe.dispatch_ranks_per_node=2"),
    "one node, selective": ("moe.dispatch_route=hierarchical", "train.recompute=selective"),
    "shared expert beside, outputs again": (
        "moe.shared_expert_overlap=true",
        "moe.dispatch_route=dedup",
        "train.recompute=outputs",
    ),
    "chunks, recompute": ("moe.dispatch_chunks=3", "train.recompute=layers"),
}


def figures(config: Config, random_batches: Batches) -> list[float]:
    """Losses and norms of three steps on this rank of a process group that is there."""
    runner = build_runner(config, read_model_config(config), start(config), {})[0]
    at, found = runner.parallel, []
    for step in range(3):
        result = runner.train(
            random_batches(config, step, at.data_rank, at.num_data_ranks), lr=0.02
        )
        found += [result.loss, result.grad_norm, result.aux_loss]
    return found


def test_every_way_of_the_tokens_gives_the_same_steps(
    configure: Configure, random_batches: Batches
) -> None:
    size = "train.global_batch_size=16"
    jobs = [configure("parallel.ep=4", size, *keys, **SHARED) for keys in WAYS.values()]
    (want,) = run_ranks(lambda *_: figures(configure(size, **SHARED), random_batches), 1)
    found = run_ranks(lambda *_: [figures(job, random_batches) for job in jobs], 4, timeout_s=120)
    for of_rank in found:
        for name, got in zip(WAYS, of_rank, strict=True):  # type: ignore[call-overload]
            assert got == pytest.approx(want, rel=1e-6), name


def test_a_payload_of_bytes_rounds_on_one_rank_as_on_many_and_in_the_backward_if_asked(
    configure: Configure, random_batches: Batches
) -> None:
    payload = "moe.dispatch_payload=float8_e4m3"
    alone = [configure(*keys) for keys in ((), (payload,))]
    plain, rounded = run_ranks(lambda *_: [figures(job, random_batches) for job in alone], 1)[0]
    jobs = [
        configure("parallel.ep=2", payload),
        configure("parallel.ep=2", payload, "moe.dispatch_quantize_backward=true"),
    ]
    one, back = run_ranks(lambda *_: [figures(job, random_batches) for job in jobs], 2)[0]
    assert one == pytest.approx(rounded, rel=1e-5)
    assert rounded[0] != plain[0] and rounded[0] == pytest.approx(plain[0], rel=1e-3)
    assert back[0] == pytest.approx(one[0], rel=1e-6), "the first loss is of a forward alone"
    assert back[1] != one[1] and back == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["moe.dispatch_ranks_per_node=2"], 'is for moe.dispatch_route="hierarchical"'),
        (["moe.dispatch_quantize_backward=true"], 'needs moe.dispatch_payload="float8_e4m3"'),
        (["moe.dispatch_chunks=2", "moe.shared_expert_overlap=true"], "choose one of them"),
        (["moe.dispatch_chunks=0"], "must be at least 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_by_name(
    configure: Configure, keys: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        configure(*keys)


def test_what_the_decoder_or_the_layout_lacks_is_refused_before_ranks_start(
    configure: Configure,
) -> None:
    config = configure("moe.shared_expert_overlap=true")
    with pytest.raises(
        ValueError, match=r"'qwen3_moe' with this config\.json has no shared expert"
    ):
        check_layout(config, read_model_config(config))
    nodes = ("moe.dispatch_route=hierarchical", "moe.dispatch_ranks_per_node=2")
    config = configure("parallel.ep=3", *nodes)
    with pytest.raises(ValueError, match=r"=2 does not divide parallel.ep=3; choose among 1, 3"):
        check_layout(config, read_model_config(config))


def test_nodes_of_the_route_are_those_of_the_machines(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure("moe.dispatch_route=hierarchical", "parallel.ep=6", "parallel.pp=2")
    model = read_model_config(config)
    for machine, node in (("4", 2), ("6", 6), ("12", 6), ("3", 3)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", machine)
        assert dispatch_options(config, model).transport.ranks_per_node == node
