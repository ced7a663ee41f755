"""States in the host's memory: the same updates bit for bit, pieces at a time."""

import math

import pytest
import torch
from torch import nn

from gpu_alloc.torch import ShapesOnly, TraceRecorder
from moe_train.config.optimizer_tables import OptimizerConfig
from moe_train.optim import optimizer as optimizers
from moe_train.optim.grads import GradientStore, ParameterGroup
from moe_train.optim.host_states import HostStates
from moe_train.optim.optimizer import Optimizer, StateOptions
from moe_train.optim.pieces import Piece, parts_of
from moe_train.optim.rounding import StochasticRounding
from moe_train.optim.update_rules import UpdateRule

SHAPES = {
    "experts.gate_up_proj": (5, 16, 8),
    "experts.down_proj": (5, 4, 3),
    "q_proj.weight": (70, 32),
    "norm.weight": (11,),
    "none.weight": (0, 4),
}
FORMS = ("float32", "master", "rounding")


def rule_of(name: str, algorithm: str) -> UpdateRule:
    is_muon = algorithm == "muon" and len(SHAPES[name]) > 1
    return UpdateRule("muon" if is_muon else "adamw", 1.0 + len(name) / 10, 0.1)


def updated(
    device: str, form: str, algorithm: str, *, on_host: bool
) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """Parameters after four updates with known gradients."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for name, shape in SHAPES.items()
    }
    optimizer = Optimizer(
        parameters,
        {name: rule_of(name, algorithm) for name in SHAPES},
        OptimizerConfig(lr=0.01),
        StateOptions(
            master_weights=form == "master",
            rounding=StochasticRounding(seed=1, first={}) if form == "rounding" else None,
            on_host="cpu" if on_host else None,
        ),
    )
    group = ParameterGroup(parameters=list(parameters.values()), reduce_group=None)
    store = GradientStore([group], fp32_accumulation=form == "master")
    for _ in range(4):
        store.clear()
        for parameter in parameters.values():
            given = torch.randn(parameter.shape, generator=generator).to(device)
            (parameter * given).sum().backward()
        optimizer.step(store, 0.01)
    return parameters, optimizer


def same_bits(device: str, form: str, algorithm: str) -> None:
    here, kept = updated(device, form, algorithm, on_host=False)
    there, offloaded = updated(device, form, algorithm, on_host=True)
    for name, parameter in here.items():
        assert torch.equal(parameter, there[name]), name
    for moment, tensors in offloaded.moments().items():
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu"
            assert torch.equal(tensor, kept.moments()[moment][name].cpu()), (moment, name)
            assert tensor.any() or not tensor.numel()
    assert offloaded.master.keys() == (SHAPES.keys() if form == "master" else set())
    for name, tensor in offloaded.master.items():
        assert torch.equal(tensor, kept.master[name].cpu()), name
        assert torch.equal(tensor.bfloat16(), there[name].detach().cpu()), name


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some elements, so that tensors of tests have several."""

    def cut(shapes: dict[str, tuple[int, ...]], uncut: set[str]) -> list[list[Piece]]:
        return parts_of(shapes, uncut, limit=1000)

    monkeypatch.setattr(optimizers, "parts_of", cut)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("form", "algorithm"),
    [*((form, "adamw") for form in FORMS), ("float32", "muon"), ("master", "muon")],
)
def test_updates_of_states_on_the_host_are_the_same_bit_for_bit(form: str, algorithm: str) -> None:
    same_bits("cpu", form, algorithm)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("form", "algorithm"),
    [*((form, "adamw") for form in FORMS), ("float32", "muon"), ("master", "muon")],
)
def test_updates_on_a_device_are_the_same_with_states_on_the_host(
    form: str, algorithm: str
) -> None:
    same_bits("cuda", form, algorithm)


@pytest.mark.gpu
def test_states_on_the_host_are_pinned_and_take_two_buffers_of_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    host = HostStates(device, "cpu")
    likes = {name: torch.empty(1000, device=device) for name in "abc"}
    states = host.zeros(likes, torch.float32)
    assert all(tensor.is_pinned() for tensor in states.values())
    buffers = set()
    parts = [[tensor[:500]] for tensor in states.values()]
    for _ in range(3):
        for (here,) in host.visits(parts):
            assert here.device.type == "cuda"
            buffers.add(here.data_ptr())
            here.add_(1)
    host.settle()
    assert len(buffers) <= 2 * 3
    for tensor in states.values():
        assert tensor[:500].eq(3).all() and tensor[500:].eq(0).all()


def test_pieces_are_all_rows_in_order_and_small(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for _ in range(200):
        shapes = {
            f"{number}": tuple(torch.randint(0, 9, (dims,), generator=draws).tolist())
            for number, dims in enumerate(torch.randint(1, 4, (6,), generator=draws).tolist())
        }
        limit = int(torch.randint(4, 200, (), generator=draws))
        parts = parts_of(shapes, {"0"}, limit)
        rows: dict[str, list[int]] = {name: [] for name in shapes}
        for piece in (piece for part in parts for piece in part):
            tensor = torch.arange(shapes[piece.name][0])
            rows[piece.name] += piece.of(tensor).tolist()
            numel = math.prod((len(piece.of(tensor)), *shapes[piece.name][1:]))
            assert piece.name == "0" or numel <= max(limit // 4, 64 * shapes[piece.name][-1])
            last = piece.end is None or piece.end == len(tensor)
            assert last or not piece.end * math.prod(shapes[piece.name][1:]) % 64
        assert rows == {name: list(range(shape[0])) for name, shape in shapes.items()}
        assert [p.name for part in parts for p in part if not p.first] == list(shapes)


def test_states_without_memory_are_no_memory_of_the_device() -> None:
    device = torch.device("cpu")
    host = HostStates(device, "meta")
    with ShapesOnly(), TraceRecorder(device=device) as recorder:
        states = host.zeros({"w": torch.empty(1 << 20)}, torch.float32)
        parts = [[states["w"][at : at + 256]] for at in range(0, 4096, 256)]
        shapes = {(here.device.type, tuple(here.shape)) for (here,) in host.visits(parts)}
        assert states["w"].is_meta
    assert shapes == {("cpu", (256,))}
    # The likeness, and two buffers.
    assert [e.size_bytes for e in recorder.events if e.action == "alloc"] == [4 << 20, 1024, 1024]
