"""Split models against numpy's slices, and joined again for all families and random layouts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weight_convert.cutting import SplitLayout
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.run import OutputOptions
from weight_convert.specs import family_names, get_spec
from weight_convert.splitting import join, split

Array = np.ndarray[Any, np.dtype[Any]]


def write_family(oracle: Any, folder: Path, family: str, rng: random.Random) -> dict[str, Any]:
    """A random model with every tensor that the family's spec names; its tensors by name."""
    spec = get_spec(family)
    keys = rng.choice([1, 2, 3, 4])
    heads = keys * rng.choice([1, 2, 3])
    head = rng.choice([1, 2])
    config = {
        "model_type": family,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "num_hidden_layers": 3,
        spec.num_experts_keys[0]: rng.randint(1, 7),
    }
    sizes = {"query": heads * head, "key": keys * head, "values": heads * head, "one": 1}
    sizes |= {"key_value": 2 * heads * head, "query_heads": heads}
    sizes["expert"] = int(config[spec.num_experts_keys[0]])
    for note in spec.tensors.values():
        for name in note.dims:
            for part in name.replace("~", "+").split("+"):
                sizes.setdefault(part, rng.randint(1, 9))
            if "+" in name or "~" in name:
                parts = name.replace("~", "+").split("+")
                sizes[name] = len(parts) * sizes[parts[0]]
    tensors = {}
    model = "model.language_model." if spec.decoder_config else "model."
    for name, note in spec.tensors.items():
        shape = tuple(sizes[dim] for dim in note.dims)
        for layer in range(4) if "{layer}" in name else (0,):
            key = name.format(model=model, layer=f"{model}layers.{layer}", n=layer)
            size_bytes = 2 * int(np.prod(shape))
            tensors[key] = ("BF16", shape, random.randbytes(size_bytes))
    tensors["model.layers.1.unheard_of"] = ("I64", (3,), random.randbytes(24))
    keys_of = list(tensors)
    rng.shuffle(keys_of)
    shards = [{key: tensors[key] for key in keys_of[i::2]} for i in range(2)]
    oracle.write_folder(folder, shards, config)
    return tensors


def random_layout(rng: random.Random) -> SplitLayout:
    return SplitLayout(
        tp=rng.randint(1, 5),
        ep=rng.randint(1, 3),
        etp=rng.randint(1, 2),
        pp=rng.randint(1, 5),
        vocab_multiple=rng.choice([0, 0, 3]),
    )


@pytest.mark.parametrize("family", family_names())
def test_any_family_split_in_any_layout_joins_to_the_same_tensors(
    oracle: Any, tmp_path: Path, family: str
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    tensors = write_family(oracle, tmp_path / "src", family, rng)
    layout = random_layout(rng)
    limit = OutputOptions(max_shard_bytes=rng.choice([10**9, 3000]))
    try:
        report = split(tmp_path / "src", tmp_path / "split", layout, options=limit)
        join(tmp_path / "split", tmp_path / "whole", options=limit)
        assert oracle.read_folder(tmp_path / "whole") == tensors
    except BaseException as error:
        error.add_note(f"seed {seed}, {layout}")
        raise
    sizes = {
        str(path.relative_to(tmp_path / "split")): path.stat().st_size
        for path in (tmp_path / "split").rglob("*")
        if path.is_file()
    }
    assert sizes == dict(report.files)
    assert (tmp_path / "whole" / "tokenizer.json").exists()


def as_arrays(tensors: Any) -> dict[str, Array]:
    return {
        key: np.frombuffer(data, np.uint16).reshape(shape)
        for key, (_, shape, data) in tensors.items()
        if len(data) == 2 * int(np.prod(shape))
    }


@pytest.mark.parametrize(("tp", "keys"), [(2, 2), (4, 2), (2, 4), (3, 3)])
def test_ranks_hold_what_numpy_cuts(oracle: Any, tmp_path: Path, tp: int, keys: int) -> None:
    heads, head, hidden, width, experts = 12, 3, 5, 6 * tp, 4
    attention = "model.layers.0.self_attn"
    shapes = {
        f"{attention}.q_proj.weight": (heads * head, hidden),
        f"{attention}.k_proj.weight": (keys * head, hidden),
        f"{attention}.o_proj.weight": (hidden, heads * head),
        "model.layers.0.mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "model.layers.0.mlp.experts.down_proj": (experts, hidden, width),
        "model.layers.0.mlp.gate.weight": (experts, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (7, hidden),
    }
    tensors = {
        key: ("BF16", shape, random.randbytes(2 * int(np.prod(shape))))
        for key, shape in shapes.items()
    }
    config = {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    }
    oracle.write_folder(tmp_path / "src", [tensors], config)
    layout = SplitLayout(tp=tp, ep=2, etp=tp, vocab_multiple=1)
    split(tmp_path / "src", tmp_path / "split", layout)
    whole = as_arrays(tensors)
    q, k, o, gate_up, down, router, norm, head_weight = whole.values()
    padded = np.concatenate([head_weight, np.zeros((-7 % tp, hidden), np.uint16)])
    for rank in range(2 * tp):
        mine = list(as_arrays(oracle.read_folder(tmp_path / "split" / f"rank-{rank:05d}")).items())
        found = dict(mine)
        t, e = rank % tp, rank // tp
        gate, up = np.split(gate_up[2 * e : 2 * e + 2], 2, axis=1)
        copies = max(tp // keys, 1)
        expected = {
            f"{attention}.q_proj.weight": np.split(q, tp)[t],
            f"{attention}.k_proj.weight": np.split(k, min(tp, keys))[t // copies],
            f"{attention}.o_proj.weight": np.split(o, tp, axis=1)[t],
            "model.layers.0.mlp.experts.gate_up_proj": np.concatenate(
                [np.split(gate, tp, axis=1)[t], np.split(up, tp, axis=1)[t]], axis=1
            ),
            "model.layers.0.mlp.experts.down_proj": np.split(down[2 * e : 2 * e + 2], tp, axis=2)[
                t
            ],
            "model.layers.0.mlp.gate.weight": router,
            "model.norm.weight": norm,
            "lm_head.weight": np.split(padded, tp)[t],
        }
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert np.array_equal(found[key], values), (rank, key)


def test_split_refuses_what_it_cannot_cut(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model()
    src = model.write(tmp_path / "src", "fused")
    config = json.loads((src / "config.json").read_text())
    with pytest.raises(WeightConvertError, match="expected at least 1"):
        SplitLayout(tp=0)
    with pytest.raises(WeightConvertError, match=r"no split\.json"):
        join(src, tmp_path / "whole")
    split(src, tmp_path / "split", SplitLayout(ep=5, etp=2))
    (tmp_path / "split" / "rank-00003" / "model.safetensors").unlink()
    with pytest.raises(WeightConvertError, match="rank-00003 has no weights"):
        join(tmp_path / "split", tmp_path / "whole")
    (tmp_path / "split" / "rank-00003").rmdir()
    with pytest.raises(
        CorruptFileError, match=r"rank-00003 is missing; split\.json is of 10 ranks"
    ):
        join(tmp_path / "split", tmp_path / "whole")
    key = "model.layers.1.self_attn.q_proj.weight"
    model.fused[key] = ("BF16", (4, 10), bytes(80))
    src = model.write(tmp_path / "heads", "fused")
    with pytest.raises(WeightConvertError, match="no num_attention_heads"):
        split(src, tmp_path / "b", SplitLayout(tp=2))
    (src / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))
    with pytest.raises(WeightConvertError, match="are not 3 equal parts"):
        split(src, tmp_path / "b", SplitLayout(tp=2))


def test_a_rank_with_another_tensor_is_named(oracle: Any, model: Any, tmp_path: Path) -> None:
    split(model.write(tmp_path / "src", "transformers"), tmp_path / "split", SplitLayout(ep=2))
    oracle.write_file(tmp_path / "split" / "rank-00001" / "model.safetensors", {})
    with pytest.raises(CorruptFileError, match="rank-00001 has nothing as model"):
        join(tmp_path / "split", tmp_path / "whole")
