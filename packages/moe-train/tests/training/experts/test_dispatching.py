"""The keys of `[moe]` that say how tokens travel, in real steps."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from comm_collectives.moe.deepep import DeepEpBackend
from moe_train.config import Config
from moe_train.data import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, check_layout, read_model_config
from moe_train.training.experts import dispatching
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
        # A larger rate shows the rounding of gradients near zero, of which Adam takes the sign.
        result = runner.train(
            random_batches(config, step, at.sample_rank, at.num_sample_ranks), lr=0.002
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
        (
            ["moe.dispatch_backend=deepep", "moe.dispatch_route=dedup"],
            'de-duplicates by itself .* not moe.dispatch_route="dedup"',
        ),
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


def test_deepep_is_refused_before_ranks_start_where_it_is_not_installed_or_cannot_run(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, *keys: str, **model: int) -> None:
        config = configure("moe.dispatch_backend=deepep", *keys, **model)
        with pytest.raises(ValueError, match=message):
            check_layout(config, read_model_config(config))

    refused(r"needs the package deep_ep, which is not installed; build it from github\.com")
    monkeypatch.setattr(dispatching, "find_spec", lambda name: name == "deep_ep")
    refused("this machine mean the CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused('train.device="cpu"', "train.device=cpu")
    refused('not those of train.dtype="float32"', "train.device=cuda")
    low = ("train.device=cuda", "train.dtype=bfloat16")
    refused("rows in multiples of 8, but hidden_size=36", *low, hidden_size=36)
    job = configure("moe.dispatch_backend=deepep", *low)
    check_layout(job, read_model_config(job))


class _Hint:
    """DeepEP's Config, by the two sizes that it tells of a buffer."""

    def __init__(self, nvlink: int, rdma: int) -> None:
        self.nvlink, self.rdma = nvlink, rdma

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvlink * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.rdma * hidden_bytes * num_ranks


class _Buffer:
    """`deep_ep.Buffer` as far as it is made."""

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.sizes = group, (num_nvl_bytes, num_rdma_bytes)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Hint:
        return _Hint(5, 0)

    @staticmethod
    def get_combine_config(num_ranks: int) -> _Hint:
        return _Hint(3, 2)


def test_deepep_gets_a_buffer_of_the_size_that_it_asks_for_on_ranks_that_share_experts(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", loader=None)
    module.__dict__["Buffer"] = _Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = []
    monkeypatch.setattr(
        dispatching, "DeepEpBackend", lambda buffer: made.append(buffer) or DeepEpBackend(buffer)
    )
    keys = ("moe.dispatch_backend=deepep", "train.device=cuda", "train.dtype=bfloat16")

    class Group:
        def size(self) -> int:
            return 2

    alone, shared = configure(*keys), configure(*keys, "parallel.ep=2")
    model = read_model_config(alone)
    assert dispatch_options(alone, model, Group()).transport.backend == "torch"  # type: ignore[arg-type]
    assert dispatch_options(shared, model).transport.backend == "torch" and not made
    options = dispatch_options(shared, model, Group())  # type: ignore[arg-type]
    assert isinstance(options.transport.backend, DeepEpBackend)
    (buffer,) = made
    row = 2 * model.hidden_size
    assert buffer.sizes == (5 * row * 2, 2 * row * 2) and isinstance(buffer.group, Group)


def test_nodes_of_the_route_are_those_of_the_machines(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure("moe.dispatch_route=hierarchical", "parallel.ep=6", "parallel.pp=2")
    model = read_model_config(config)
    for machine, node in (("4", 2), ("6", 6), ("12", 6), ("3", 3)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", machine)
        assert dispatch_options(config, model).transport.ranks_per_node == node
