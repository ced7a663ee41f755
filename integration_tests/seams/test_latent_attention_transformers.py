"""Multi-head latent attention against transformers' DeepSeek-V2 and V3, with their own weights.

transformers rotates in fp32 (V2) and norms in fp32 whatever the dtype of the model. In fp64 its
code runs as it is, with every conversion to fp32 made one to fp64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_train.model.documents import added_mask, read_documents
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import AttentionContext
from moe_train.model.mla import LatentAttention, MLAOptions

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, ROPE = 32, 4, 6
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 7,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7, "rope_theta": 100.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_lite": ("deepseek_v2", {"q_lora_rank": None}),
    "v2": ("deepseek_v2", {"q_lora_rank": 20, "attention_bias": True}),
    "v3": ("deepseek_v3", {"q_lora_rank": 20, "rope_parameters": YARN}),
    "v3_half_split": ("deepseek_v3", {"q_lora_rank": 9, "rope_interleave": False}),
    "v3_direct_queries": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-6)]
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [3, 4, 5, 6, 7, 8, 9, 10, 11]])


class InDouble(TorchFunctionMode):
    """Every conversion to fp32 becomes one to fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def modules_of(case: str, dtype: torch.dtype) -> tuple[nn.Module, LatentAttention]:
    """transformers' attention with random weights, and ours with the same ones."""
    model_type, values = CASES[case]
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    prefix = model_type.replace("deepseek_v", "DeepseekV")
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **values})
    config._attn_implementation = "eager"
    theirs: nn.Module = getattr(modeling, f"{prefix}Attention")(config, layer_idx=3).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    options = MLAOptions(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        softmax_scale=theirs.scaling,
        attention_bias=config.attention_bias,
        rope_interleave=getattr(config, "rope_interleave", True),
        rms_norm_eps=1e-6,
    )
    ours = LatentAttention(
        options, hidden_size=HIDDEN, num_heads=HEADS, layer=3, device=None, dtype=dtype
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def angles_of(positions_BS: Tensor) -> Tensor:
    frequencies = 10.0 ** -(torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    return positions_BS[..., None].double() * frequencies


def context_of(positions_BS: Tensor, dtype: torch.dtype) -> AttentionContext:
    angles = angles_of(positions_BS)
    table = torch.cat((angles, angles), dim=-1)
    return AttentionContext(table.cos().to(dtype), table.sin().to(dtype), None, None)


def run_theirs(
    module: nn.Module, x: Tensor, positions_BS: Tensor, allowed: Tensor, cache: Any = None
) -> Tensor:
    angles = angles_of(positions_BS)
    mask = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, -torch.inf)
    tables: Any
    if "V2" in type(module).__name__:
        tables = torch.polar(torch.ones_like(angles), angles)
        tables = tables if x.dtype == torch.float64 else tables.to(torch.complex64)
    else:
        table = torch.cat((angles, angles), dim=-1).to(x.dtype)
        tables = (table.cos(), table.sin())
    given = {"position_embeddings": tables, "attention_mask": mask, "past_key_values": cache}
    if x.dtype == torch.float64:
        with InDouble():
            out: Tensor = module(x, **given)[0]
    else:
        out = module(x, **given)[0]
    return out


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_documents", [True, False])
def test_values_and_gradients_are_those_of_transformers(
    seed: int, case: str, dtype: torch.dtype, limit: float, with_documents: bool
) -> None:
    theirs, ours = modules_of(case, dtype)
    positions = POSITIONS if with_documents else POSITIONS[1:].expand(2, -1)
    context = context_of(positions, dtype)
    mask = read_documents(positions).mask(None)
    context = replace(context, mask_B1SS=mask, added_B1SS=added_mask(mask, dtype))
    assert (context.mask_B1SS is not None) == with_documents
    length = positions.shape[1]
    allowed = torch.ones(2, 1, length, length).tril().bool()
    if context.mask_B1SS is not None:
        allowed = context.mask_B1SS
    x = torch.randn(2, length, HIDDEN, dtype=dtype)
    factors = torch.randn_like(x)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = run_theirs(theirs, x_theirs, positions, allowed)
    expected.backward(factors)
    got = ours(x_ours, context, None)
    got.backward(factors)
    assert relative(got, expected) < limit
    assert relative(x_ours.grad, x_theirs.grad) < limit
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, wanted[name]) < 2 * limit, name


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_cache_continues_as_in_transformers_and_as_the_whole_sequence(
    seed: int, case: str, dtype: torch.dtype, limit: float
) -> None:
    theirs, ours = modules_of(case, dtype)
    positions = torch.arange(8).expand(2, -1)
    allowed = torch.ones(2, 1, 8, 8).tril().bool()
    x = torch.randn(2, 8, HIDDEN, dtype=dtype)
    their_cache, cache = transformers.DynamicCache(), KeyValueCache()
    their_parts, parts = [], []
    with torch.no_grad():
        whole = ours(x, context_of(positions, dtype), None)
        for start, end in ((0, 4), (4, 5), (5, 8)):  # a prompt, one token, several at once
            part = slice(start, end)
            their_parts.append(
                run_theirs(
                    theirs, x[:, part], positions[:, part], allowed[:, :, part, :end], their_cache
                )
            )
            parts.append(ours(x[:, part], context_of(positions[:, part], dtype), cache))
    assert relative(torch.cat(parts, 1), torch.cat(their_parts, 1)) < limit
    assert relative(torch.cat(parts, 1), whole) < limit
