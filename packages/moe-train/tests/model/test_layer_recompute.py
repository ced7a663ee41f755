"""What a stage keeps for its backward: counted by storage, and what arithmetic says."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_train.model.config import DecoderConfig
from moe_train.model.layer_recompute import Form, kept_operations
from moe_train.model.stage import DecoderStage, StageOptions

D, H, K, HEAD, E, CHOICES, WIDTH, DENSE = 256, 4, 2, 64, 4, 2, 64, 512
LAYERS, B, S = 4, 2, 64
T = B * S
CONFIG = DecoderConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 40,
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": HEAD,
        "num_experts": E,
        "num_experts_per_tok": CHOICES,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": DENSE,
        "mlp_only_layers": tuple(range(LAYERS)),
    }
)


class Storages(TorchDispatchMode):
    """Every storage that an operation returned, by weak reference."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.seen[id(storage)] = weakref.ref(storage)
        return out

    def alive_bytes(self, others: Iterable[Tensor]) -> int:
        """Of what still lives, each address once, besides the storages of `others`."""
        left_out = {t.untyped_storage().data_ptr() for t in others}
        alive = [storage for found in self.seen.values() if (storage := found()) is not None]
        sizes = {s.data_ptr(): s.nbytes() for s in alive if s.data_ptr() not in left_out}
        return sum(sizes.values())


def kept_numbers(form: Form | None, *, sparse: bool) -> int:
    """Numbers of fp32 that a layer keeps for each token, beside what all layers share."""
    q, kv = H * HEAD, 2 * K * HEAD
    lse, routing = H, 2 * E + 3 * CHOICES if sparse else 0
    logits = E + 2 * CHOICES if sparse else 0  # with the choices: all that a second forward needs
    mlp = 0 if sparse else 2 * DENSE  # gate and up
    if form == "layers":
        return D + logits
    if form == "selective":
        products = q + kv + D + mlp + (0 if sparse else D)  # o, and down
        return D + products + q + lse + logits
    statistics = H + K  # of the norms of queries and keys
    attention = D + q + kv + statistics + q + kv // 2 + 2 * q + lse + D
    kept = attention + mlp + (2 * CHOICES * WIDTH if sparse else 0) + routing
    if form == "outputs":
        return kept
    return kept + 2 * (D + 1) + (0 if sparse else 2 * DENSE)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("form", [None, "layers", "selective", "outputs"])
def test_a_stage_keeps_what_arithmetic_says_within_5_percent(
    form: Form | None, sparse: bool
) -> None:
    stage = DecoderStage(
        replace(CONFIG, sparse_layers=(sparse,) * LAYERS),
        StageOptions(
            layers=range(LAYERS),
            first=True,
            last=False,
            experts_implementation="fused",
            recompute=form,
            recompute_keep=("matrix_products", "attention"),
        ),
    )
    tokens = torch.randint(0, 40, (B, S))
    positions = torch.arange(S).expand(B, S).contiguous()
    with Storages() as storages:
        out = stage(tokens, positions)
    kept = storages.alive_bytes([*stage.parameters(), tokens, positions, *out.tensors])
    rotary = 2 * S * B * HEAD
    assert kept / 4 == pytest.approx(
        LAYERS * T * kept_numbers(form, sparse=sparse) + rotary, rel=0.05
    )


def test_operations_have_names_of_ours_and_of_torch() -> None:
    found = kept_operations(("attention", "aten.mm.default", "aten.mm.default"))
    assert torch.ops.aten.mm.default in found and len(found) == 5
    for name in ("aten.mm", "matmul", "aten.nothing.default", "aten.mm.nothing", "nowhere.mm.x"):
        with pytest.raises(ValueError, match="no operation of torch; give matrix_products, att"):
            kept_operations((name,))
