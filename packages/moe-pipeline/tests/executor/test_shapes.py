from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.config import MoEConfig, RouterLosses
from moe_pipeline.executor.shapes import TensorShape, infer_shapes
from moe_pipeline.executor.stage_io import StageOutput
from moe_pipeline.layer.moe_layer import MoELayer, MoEOutput
from moe_pipeline.recomputation.recomputing import recompute
from moe_pipeline.recomputation.selective import (
    MATRIX_PRODUCTS,
    recompute_modules,
    selective_recompute,
)


@dataclass
class Record:
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    seen: list = field(default_factory=list)


class Moments(NamedTuple):
    mean: Tensor
    scale: Tensor


class Embed(nn.Module):
    """Counts calls in every way there is, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.calls, self.log, self.record = 0, {"calls": []}, Record()
        self.moments = Moments(torch.zeros(6), torch.ones(6))

    def forward(self, ids, *, target):
        x = F.dropout(self.embed(ids), 0.5) + torch.rand(6)
        x = (x - self.moments.mean) * self.moments.scale
        self.calls += 1
        self.log["calls"].append(x.shape)
        self.record.total += x.sum().detach()
        self.record.seen.append(1)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return StageOutput(tensors=({"hidden": x, "ids": ids}, None, ids > 3))


class Head(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, 3, dtype=torch.float32)

    def forward(self, state, none, mask, *, target):
        logits = self.linear(state["hidden"]) * mask[..., None]
        return StageOutput(tensors=(logits,), loss=F.cross_entropy(logits.flatten(0, 1), target))


IDS = torch.zeros(2, 5, dtype=torch.int64)
TARGET = torch.zeros(10, dtype=torch.int64)


def test_shapes_dtypes_and_gradient_wishes_are_those_of_a_forward():
    stages = [Embed(), Head()]
    found = infer_shapes(stages, (IDS,), target=TARGET)
    state = {
        "hidden": TensorShape((2, 5, 6), torch.float32, True),
        "ids": TensorShape((2, 5), torch.int64),
    }
    assert found == [
        (state, None, TensorShape((2, 5), torch.bool)),
        (TensorShape((2, 5, 3), torch.float32, True),),
    ]
    real = stages[0](IDS, target=None).tensors
    assert real[0]["hidden"].shape == (2, 5, 6) and real[0]["hidden"].requires_grad


def test_nothing_of_the_stages_changes_and_no_random_number_is_drawn():
    stages = [Embed(), Head()]
    before = {k: v.clone() for s in stages for k, v in s.state_dict().items()}
    state = torch.get_rng_state()
    infer_shapes(stages, (IDS,), target=TARGET)
    assert torch.equal(state, torch.get_rng_state())
    for key, value in ((k, v) for s in stages for k, v in s.state_dict().items()):
        assert torch.equal(before[key], value), key
    first = stages[0]
    assert (first.calls, first.log, first.record.seen) == (0, {"calls": []}, [])
    assert first.record.total.item() == 0 and first.record.total.device.type == "cpu"
    assert all(p.grad is None and p.device.type == "cpu" for p in first.parameters())


def test_a_stage_that_cannot_take_what_comes_is_named():
    with pytest.raises(ValueError, match=r"stage 1 cannot run on what stage 0 returns, .*5, 6\)"):
        infer_shapes([Embed(), Head(width=7)], (IDS,), target=TARGET)
    words = r"stage 0 cannot run on the inputs, .*float32.*: an embedding got ids of torch.float32"
    with pytest.raises(ValueError, match=words):
        infer_shapes([Embed()], (IDS.float(),))
    with pytest.raises(TypeError, match="stage 1 is a function; give an"):
        infer_shapes([Embed(), lambda *x, target: None], (IDS,))


def test_stages_built_on_meta_and_layers_that_depend_on_values():
    """Routing cannot be done without values; its result has the shape of the input."""
    config = MoEConfig(
        hidden_size=6,
        moe_intermediate_size=4,
        num_experts=4,
        num_experts_per_tok=2,
        losses=RouterLosses(router_aux_loss_coef=0.1),
    )

    class Middle(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.layer = MoELayer(config, device=device)

        def forward(self, state, none, mask, *, target):
            out = self.layer(state["hidden"])
            return StageOutput(tensors=({"hidden": out.hidden}, none, mask), loss=out.aux_loss)

    def routed(layer, x):
        zero, hidden = x.new_zeros(()), x * layer.gate.weight.to("meta").sum()
        none = torch.empty(0, dtype=torch.int64)
        return MoEOutput(hidden=hidden, aux_loss=zero, z_loss=zero, load_E=none, topk_idx_TK=none)

    found = infer_shapes(
        [Embed(), Middle("meta"), Middle("cpu"), Head()],
        (IDS,),
        target=TARGET,
        stand_ins={MoELayer: routed},
    )
    assert found[2] == (
        {"hidden": TensorShape((2, 5, 6), torch.float32, True)},
        None,
        TensorShape((2, 5), torch.bool),
    )


def test_shared_parameters_stay_shared():
    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.a = self.b = weight
            self.part = nn.ModuleList([self._child()])

        def _child(self):
            child = nn.Module()
            child.weight = self.a
            return child

        def forward(self, x, *, target):
            assert self.a is self.b is self.part[0].weight and isinstance(self.a, nn.Parameter)
            return StageOutput(tensors=(x @ self.a,))

    weight = nn.Parameter(torch.ones(3, 2), requires_grad=False)
    found = infer_shapes([Tied(weight)], (torch.ones(4, 3),))
    assert found == [(TensorShape((4, 2), torch.float32, False),)]


def test_modules_that_are_recomputed_have_the_shapes_of_others(seed):
    stage = Embed()
    expected = infer_shapes([stage], (IDS,))
    ways = {"embed": recompute, "norm": partial(selective_recompute, keep=MATRIX_PRODUCTS)}
    recompute_modules(stage, ways)
    assert infer_shapes([stage], (IDS,)) == expected
    assert stage.norm.num_batches_tracked == 0 and stage.calls == 0
