"""Names on disk have one home: what the other packages know of tensors follows from the specs.

moe_pipeline names the tensors of transformers' modules of an MoE block, moe_train those of its
decoders, unified_ckpt guesses how ranks cut a tensor from its name; each is held against the specs.
"""

import re
from pathlib import Path

import pytest

import moe_train
from moe_pipeline import family_of
from moe_train.model.families import RULES
from unified_ckpt.tools.rewrite import rule_by_name
from weight_convert import get_spec
from weight_convert.specs import Matcher, Side, family_names

TP_DIM = {"column": 0, "vocab": 0, "kv": 0, "row": 1, "router": None, "norm": None, "buffer": None}
# Tensors of dense layers that the guess by names leaves whole, though ranks could share them.
GUESSED_WHOLE = re.compile(
    r".*(q_b_proj|kv_b_proj|eh_proj|shared_head\.head|sinks|q_norm|k_norm|\.mamba\..*|_bias)"
    r"(\.weight|\.bias)?"
)


@pytest.mark.parametrize("model_type", RULES)
def test_every_tensor_of_a_block_stands_in_the_spec(model_type: str) -> None:
    spec = get_spec(model_type)
    known = Matcher([Side(names=(name,), groups=()) for name in spec.tensors])
    for key in family_of(model_type).block_keys:
        assert known.find(f"model.layers.0.mlp.{key.theirs}") is not None, key.theirs


def test_moe_train_has_no_names_of_its_own() -> None:
    specs = [get_spec(model_type) for model_type in RULES]
    stored = {
        part
        for spec in specs
        for form in spec.formats.values()
        for rule in form.rules
        for side_name in rule.source.names
        for part in re.findall(r"\b(block_sparse_moe|w1|w2|w3|moe_statics)\b", side_name)
    }
    assert stored == {"block_sparse_moe", "w1", "w2", "w3", "moe_statics"}
    for path in Path(moe_train.__file__).parent.rglob("*.py"):
        code = re.sub(r'"""(?s:.*?)"""', "", path.read_text(encoding="utf-8"))
        for name in stored:
            assert not re.search(rf'"[^"\n]*\b{name}\b[^"\n]*"', code), (path.name, name)


@pytest.mark.parametrize("model_type", family_names())
def test_the_guess_by_names_never_cuts_otherwise_than_the_role_says(model_type: str) -> None:
    spec = get_spec(model_type)
    for template, note in spec.tensors.items():
        if note.role == "other":  # of a vision tower, which no trainer here cuts
            continue
        name = template.format(layer="model.layers.0", model="model.")
        view = spec.stored_views(name, (4,) * len(note.dims))[0]
        rule = rule_by_name(view.key, view.stored_shape)
        of_expert = "expert" in note.dims and note.role in ("column", "row")
        assert rule.tp_dim in (None, TP_DIM[note.role]), (view.key, note)
        assert of_expert or not rule.expert, (view.key, note)
        wanted = TP_DIM[note.role]
        if not of_expert and wanted is not None and not GUESSED_WHOLE.fullmatch(name):
            assert rule.tp_dim == wanted, (view.key, note)
