"""Every family's decoder against transformers': logits, loss, gradients, files, generation."""

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_train.checkpoint.parts import read_part
from moe_train.generation import load_model
from moe_train.layout import read_decoder, single_rank_layouts, stage_tensors, stored_tensors
from moe_train.model import DecoderStage, KeyValueCache, StageOptions, Target
from ranktest.fixtures import one_thread as one_thread
from unified_ckpt import save

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    "moe_num_experts": 6,
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 2),
    "shared_expert_intermediate_size": 20,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LATENT = {
    "head_dim": 6,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}

# Case -> model type, and what the configuration has besides the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral_window": ("mixtral", {"sliding_window": 4}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe_window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 3, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe_window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "olmoe": ("olmoe", {"clip_qkv": 0.6}),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, **GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": 9,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6},
            "num_mtp_layers": 0,
        },
    ),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0}),
    "glm4_moe_plain": ("glm4_moe", {"first_k_dense_replace": 2, "num_mtp_layers": 0}),
    "ernie4_5_moe": ("ernie4_5_moe", {"tie_word_embeddings": True}),
    "ernie4_5_moe_some": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 2},
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": 3, "rope_parameters": {**YARN, "truncate": False}}),
}


@dataclass(frozen=True)
class Reference:
    """transformers' model in two dtypes and the folder that the fp32 one saved itself to."""

    models: dict[torch.dtype, PreTrainedModel]
    folder: Path

    def logits(self, batch: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        tokens, _, positions = batch
        model, masks = self.models[dtype], {}
        if model.config.model_type == "gpt_oss":
            # It does not derive documents from positions.
            windows = {"full_attention": 99, "sliding_attention": model.config.sliding_window}
            masks["attention_mask"] = {
                kind: additive_mask(positions, window).to(dtype) for kind, window in windows.items()
            }
        return model(input_ids=tokens, position_ids=positions, use_cache=False, **masks).logits


class InDouble(TorchFunctionMode):
    """Every conversion to fp32 becomes one to fp64: norms, routers and rotary tables are in fp32
    in transformers whatever the dtype of the model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_wide, args), **{k: _wide(v) for k, v in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def additive_mask(positions: Tensor, window: int) -> Tensor:
    """[B, 1, S, S]: 0 where a token of the same document lies at most `window` - 1 behind."""
    places = torch.arange(positions.shape[1])
    behind = places[:, None] - places
    allowed = (behind >= 0) & (behind < window) & (behind <= positions[:, :, None])
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[:, None]


def reference_model(case: str) -> PreTrainedModel:
    """With random weights: norms around 1, every bias and sink off 0."""
    torch.manual_seed(7)
    model_type, values = CASES[case]
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = AutoConfig.for_model(model_type, **{**sizes, **values})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + middle)
    return model


@pytest.fixture(scope="module", params=CASES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    with InDouble():
        double = reference_model(request.param).double().eval()
    single = copy.deepcopy(double).float()
    folder = tmp_path_factory.mktemp(request.param)
    single.save_pretrained(folder)
    # The only experts of transformers that know fp64.
    double.config._experts_implementation = "eager"
    return Reference({torch.float32: single, torch.float64: double}, folder)


def stage_of(folder: Path, dtype: torch.dtype) -> DecoderStage:
    """Our whole decoder in training mode, where experts report their loads."""
    config = read_decoder(folder)
    stage = DecoderStage(
        config,
        StageOptions(
            layers=range(config.num_hidden_layers),
            first=True,
            last=True,
            experts_implementation="loop" if dtype == torch.float64 else "auto",
            dtype=dtype,
        ),
    )
    stored = stored_tensors(single_rank_layouts(stage, config), stage_tensors(stage), rank=0)
    read_part(folder, "model", [stored], cast=True)
    return stage


def batch_of() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels (some ignored) and positions; two sequences hold several documents."""
    tokens = torch.randint(0, 64, (3, 12))
    labels = torch.randint(0, 64, (3, 12))
    labels[0, :3] = -100
    positions = torch.arange(12).expand(3, 12).clone()
    positions[0, 7:] -= 7
    positions[1, 5:] -= 5
    positions[1, 8:] -= 3
    return tokens, labels, positions


def stored_gradients(stage: DecoderStage) -> dict[str, Tensor]:
    """Our gradients under the keys and in the layout of the checkpoint."""
    layouts = single_rank_layouts(stage, stage.config)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in stage.named_parameters()
    }
    shards = stored_tensors(layouts, gradients, rank=0).shards
    return {shard.key: shard.tensor for shard in shards}


def reference_gradients(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """transformers' gradients, stored by its own rules for weights."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for target, source in zip(holder.parameters(), model.parameters(), strict=True):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    holder.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_loss_and_gradients_equal_those_of_transformers(
    reference: Reference, tmp_path: Path, dtype: torch.dtype, limit: float
) -> None:
    stage = stage_of(reference.folder, dtype)
    tokens, labels, positions = batch = batch_of()
    with InDouble() if dtype == torch.float64 else nullcontext():
        theirs = reference.logits(batch, dtype)
        with torch.no_grad():
            ours = stage.logits(stage.hidden_states(tokens, positions)[0])
        loss = stage(tokens, positions, target=Target(labels, 0.1)).loss
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    their_loss = 0.1 * F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, their_loss, rtol=limit, atol=limit)
    loss.backward()
    their_loss.backward()
    gradients = stored_gradients(stage)
    for key, gradient in reference_gradients(reference.models[dtype], tmp_path).items():
        if key.endswith("e_score_correction_bias"):
            continue
        assert bool(gradient.any()) or "experts" in key, f"{key}: the reference has no gradient"
        torch.testing.assert_close(gradients.pop(key), gradient, rtol=10 * limit, atol=limit)
    assert not gradients, f"transformers has no {sorted(gradients)}"


@torch.no_grad()
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(reference: Reference) -> None:
    half = copy.deepcopy(reference.models[torch.float32]).to(torch.bfloat16)
    half.config._experts_implementation = "eager"
    tokens, _, positions = batch = batch_of()
    exact = reference.logits(batch, torch.float32)
    theirs = Reference({torch.bfloat16: half}, reference.folder).logits(batch, torch.bfloat16)
    stage = stage_of(reference.folder, torch.bfloat16)
    ours = stage.logits(stage.hidden_states(tokens, positions)[0])
    assert ours.dtype == torch.bfloat16

    def error(logits: Tensor) -> float:
        """Of the middle token: rounding may send a few to another expert, on either side."""
        return float(((logits.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    assert error(ours) <= 1.5 * error(theirs) <= 0.05, (error(ours), error(theirs))


def test_a_saved_decoder_opens_in_transformers_bit_for_bit(
    reference: Reference, tmp_path: Path
) -> None:
    stage = load_model(reference.folder)
    stored = stored_tensors(single_rank_layouts(stage, stage.config), stage_tensors(stage), rank=0)
    files = {"config.json": stage.config.to_json("float32").encode()}
    save({"model": stored.shards}, checkpoint_id=tmp_path / "ours", files=files)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    expected = reference.models[torch.float32].state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    folders = (reference.folder, tmp_path / "ours")
    theirs, ours = (load_file(folder / "model.safetensors") for folder in folders)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    given, written = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert written == given


def next_logits(stage: DecoderStage, fresh: list[int], start: int, cache: KeyValueCache) -> Tensor:
    """Logits [V] after the tokens `fresh` at positions from `start`."""
    positions = torch.arange(start, start + len(fresh))[None]
    with torch.no_grad():
        hidden, _ = stage.hidden_states(torch.tensor([fresh]), positions, cache)
        return stage.logits(hidden[:, -1:])[0, 0]


def test_generation_with_the_cache_equals_the_whole_sequence(reference: Reference) -> None:
    stage = load_model(reference.folder)
    tokens = torch.randint(0, 64, (11,)).tolist()
    cache, done = KeyValueCache(), 0
    for length in (4, 1, 3, 1, 1, 1):
        logits = next_logits(stage, tokens[done : done + length], done, cache)
        done += length
        whole = next_logits(stage, tokens[:done], 0, KeyValueCache())
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)


CONVERSATIONS = (5, 3, 7, 1)
"""Lengths; of the second nothing is predicted."""


def conversations() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels and positions of each conversation, [1, length]; the last has no label."""
    made = []
    generator = torch.Generator().manual_seed(3)
    for number, length in enumerate(CONVERSATIONS):
        tokens = torch.randint(1, 64, (1, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, -1] = -100
        labels[:, : length if number == 1 else 1] = -100
        made.append((tokens[:, :-1], labels, torch.arange(length)[None]))
    return made


def in_rows(rows: list[list[int]], *, left: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The conversations with these numbers one behind the other, in rows padded to 11 places."""
    whole = conversations()
    parts: list[list[Tensor]] = [[], [], []]
    for row in rows:
        for part, pad, which in zip(parts, (0, -100, -1), range(3), strict=True):
            tensor = torch.cat([whole[number][which] for number in row], dim=1)
            missing = 11 - tensor.shape[1]
            part.append(F.pad(tensor, (missing, 0) if left else (0, missing), value=pad))
    tokens, labels, positions = (torch.cat(part) for part in parts)
    return tokens, labels, positions


def loss_and_gradients(
    stage: DecoderStage, batches: list[tuple[Tensor, Tensor, Tensor]]
) -> tuple[float, dict[str, Tensor]]:
    stage.zero_grad()
    total = 0.0
    for tokens, labels, positions in batches:
        loss = stage(tokens, positions, target=Target(labels, 0.1, tokens)).loss
        assert loss is not None
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


def test_packed_padded_and_single_conversations_are_the_same(
    reference: Reference,
) -> None:
    stage = stage_of(reference.folder, torch.float64)
    expected, gradients = loss_and_gradients(stage, conversations())
    assert expected > 1.0
    loads = {n: int(load_E.sum()) for n, load_E in stage.take_record().load_E.items()}
    forms = {
        "packed": in_rows([[0, 1], [2, 3]]),
        "packed left": in_rows([[0, 1], [2, 3]], left=True),
        "padded": in_rows([[0], [1], [2], [3]]),
        "padded left": in_rows([[0], [1], [2], [3]], left=True),
    }
    for form, batch in forms.items():
        loss, found = loss_and_gradients(stage, [batch])
        assert abs(loss - expected) <= 1e-12 * expected, form
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)
        counted = stage.take_record().load_E
        assert {n: int(load_E.sum()) for n, load_E in counted.items()} == loads, form


@torch.no_grad()
def test_padded_logits_equal_those_of_transformers_with_a_mask(reference: Reference) -> None:
    model, stage = reference.models[torch.float32], stage_of(reference.folder, torch.float32)
    for left in (False, True):
        tokens, _, positions = in_rows([[0], [1], [2], [3]], left=left)
        theirs = model(
            input_ids=tokens,
            attention_mask=(positions >= 0).long(),
            position_ids=positions.clamp(min=0),
            use_cache=False,
        ).logits
        ours = stage.logits(stage.hidden_states(tokens, positions)[0])
        is_token = positions >= 0
        torch.testing.assert_close(ours[is_token], theirs[is_token], rtol=1e-5, atol=1e-5)
        assert bool(ours.isfinite().all())
