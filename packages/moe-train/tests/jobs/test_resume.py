"""What a resumed run may change: every change with its answer, by the check before ranks start."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.config import Config, load_config
from moe_train.config.tables import all_keys
from moe_train.jobs.job import check, train
from moe_train.jobs.model_changes import model_changes
from moe_train.jobs.resume import _moment_notes
from moe_train.model import DecoderConfig
from moe_train.rank import RankContext
from moe_train.training import read_model_config
from ranktest import run_ranks

Configure = Callable[..., Config]

OF_THE_JOB = {
    "free": [
        "parallel.pp=2",
        "parallel.dp=2",
        "parallel.ep=3",
        "parallel.schedule=forward_then_backward",
        "parallel.schedule=zb_1p",
        "train.global_batch_size=24",
        "train.gradient_accumulation_steps=1",
        "train.max_steps=40",
        "train.dtype=bfloat16",
        "train.recompute=layers",
        'train.trainable=["lm_head.weight"]',
        "train.loss_chunk_tokens=5",
        "train.validation_sequences=5",
        "train.exit_duration_minutes=9.0",
        "checkpoint.keep_best=true",
        "checkpoint.moments=int8",
        "optimizer.lr=0.02",
        "optimizer.warmup_steps=1",
        "optimizer.decay=linear",
        "optimizer.max_grad_norm=1.0",
        "model.experts_implementation=loop",
        "checkpoint.interval_steps=3",
        "log.interval_steps=2",
    ],
    "asked": [
        "train.seed=9",
        "train.mtp_loss_coef=0.1",
        "data.sequence_length=6",
        "data.reset_at_documents=false",
        "data.packing=pad",
        "data.max_bytes=9000",
        "data.validation_fraction=0.4",
        "moe.aux_loss_scope=sequence",
        "moe.aux_loss_coef=0.5",
        "moe.z_loss_coef=0.5",
        "moe.capacity_factor=1.5",
        "moe.token_drop_policy=position",
        "optimizer.weight_decay=0.2",
        "optimizer.beta1=0.8",
        "optimizer.beta2=0.9",
        "optimizer.eps=1e-6",
        "optimizer.name=muon",
        "optimizer.muon_momentum=0.9",
        "param_groups.a.parameters=*.mlp.gate.weight",
        "tokenizer.vocab_size=280",
        "tokenizer.train_bytes=900",
    ],
}
OF_THE_MODEL: dict[str, list[dict[str, object]]] = {
    "free": [
        {"use_cache": False},
        {"initializer_range": 0.5},
        {"transformers_version": "5.0"},
        {"pretraining_tp": 2},
    ],
    "asked": [
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": False},
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"max_position_embeddings": 128},
        {"router_aux_loss_coef": 0.5},
    ],
    "never": [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_experts": 4},
        {"moe_intermediate_size": 8},
        {"head_dim": 8},
        {"num_key_value_heads": 2},
        {"num_attention_heads": 4},
        {"vocab_size": 400},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
    ],
}
MATRIX = [
    *((answer, [change], {}) for answer, changes in OF_THE_JOB.items() for change in changes),
    *((answer, [], change) for answer, changes in OF_THE_MODEL.items() for change in changes),
]


@pytest.mark.parametrize(("answer", "overrides", "model"), MATRIX, ids=lambda value: str(value))
def test_every_change_has_its_answer(
    configure: Configure,
    trained_run: Path,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    overrides: list[str],
    model: dict[str, object],
) -> None:
    source = trained_run / "checkpoint-2"
    name = overrides[0].partition("=")[0] if overrides else f"model.{next(iter(model))}"
    same = [f"train.output_dir={trained_run}"]
    if name in ("data.max_bytes", "data.validation_fraction"):  # else one is trained on other text
        same.append(f"tokenizer.file={source / 'tokenizer.json'}")
    config = configure(*same, *overrides, **model)
    allow = ["--allow-change", name]
    if answer == "free":
        assert check(config, "latest") == source
        assert f"  {name}: " in capsys.readouterr().out or name == "model.transformers_version"
        return
    with pytest.raises(ValueError, match=r"^--resume \S+checkpoint-2: ") as refusal:
        check(config, "latest")
    said = str(refusal.value)
    assert f"{name}: " in said and " -> " in said and "\n" not in said
    assert f"  {name}: " in capsys.readouterr().out, "the difference is shown, also when refused"
    if answer == "asked":
        assert " ".join(allow) in said
        assert check(config, "latest", [name]) == source
        return
    assert "--allow-change" not in said and "would mean nothing" in said
    with pytest.raises(ValueError, match="would mean nothing"):
        check(config, "latest", [name])


def test_no_change_is_no_line(
    configure: Configure, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = trained_run / "checkpoint-2" / "moe_train.toml"
    check(load_config(own, ["train.max_steps=4"]), "latest")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resuming {trained_run}/checkpoint-2: step 2, 24 samples used"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "train.max_steps",
        "learning rate",
    ]


def test_several_refused_changes_are_one_message(configure: Configure, trained_run: Path) -> None:
    config = configure(
        f"train.output_dir={trained_run}", "train.seed=9", "optimizer.beta1=0.5", rms_norm_eps=0.1
    )
    with pytest.raises(ValueError, match=r"train\.seed: 0 -> 9; ") as refusal:
        check(config, "latest")
    names = ["train.seed", "optimizer.beta1", "model.rms_norm_eps"]
    assert str(refusal.value).endswith(" ".join(f"--allow-change {name}" for name in names))
    with pytest.raises(ValueError, match=r"allow-change optimizer\.beta1$"):
        check(config, "latest", [names[0], names[2]])
    assert check(config, "latest", names)


def test_text_is_compared_by_what_it_holds(
    configure: Configure, trained_run: Path, corpus: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / corpus.name
    shutil.copytree(corpus, moved)
    base = [f"train.output_dir={trained_run}", f"data.cache_dir={tmp_path / 'own'}"]
    assert check(configure(*base, f"data.corpus={moved}"), "latest")
    own = f"tokenizer.file={trained_run / 'checkpoint-2' / 'tokenizer.json'}"
    file = next(moved.iterdir())
    file.write_text(file.read_text() + " return")
    other = configure(*base, own, f"data.corpus={moved}")
    with pytest.raises(ValueError, match=r"data\.corpus: .*--allow-change data\.corpus$"):
        check(other, "latest")
    assert check(other, "latest", ["data.corpus"])


def test_another_tokenizer_is_refused_with_the_checkpoints_own(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    values = json.loads((trained_run / "checkpoint-2" / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[60:62]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other.json").write_text(json.dumps(values))
    config = configure(
        f"train.output_dir={trained_run}", f"tokenizer.file={tmp_path / 'other.json'}"
    )
    said = r"tokenizer\.file: .*, set tokenizer\.file=\S+/checkpoint-2, leave out tokenizer\.chat_"
    with pytest.raises(ValueError, match=said):
        check(config, "latest")
    assert check(config, "latest", ["tokenizer.file"])


def test_the_checkpoints_own_tokenizer_is_taken_from_where_the_message_says(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    """Also where its template and end token lie in other files, and config.json names another."""
    mine = tmp_path / "mine"
    shutil.copytree(trained_run / "checkpoint-2", mine)
    values = json.loads((mine / "tokenizer.json").read_text())
    end = {**values["added_tokens"][0], "id": len(values["model"]["vocab"]), "content": "<|end|>"}
    values["added_tokens"].append(end)
    (mine / "tokenizer.json").write_text(json.dumps(values))
    (mine / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "chat_template": "a"}')
    (mine / "generation_config.json").unlink()
    base = [f"train.output_dir={tmp_path / 'other'}", f"tokenizer.file={mine}", "train.max_steps=1"]
    base.append('tokenizer.new_special_tokens=["<|new|>"]')
    first = configure(*base)
    check(first, "")
    run_ranks(lambda *_: train(first, "", RankContext()), 1)
    (mine / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "chat_template": "b"}')
    base[-2] = "train.max_steps=2"
    with pytest.raises(ValueError, match=r"set tokenizer\.file=\S+/checkpoint-1, ") as refusal:
        check(configure(*base), "latest")
    said = re.search(r"tokenizer\.file=(\S+),", str(refusal.value))
    assert said is not None
    assert check(configure(*base, said[0].rstrip(",")), "latest")


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("routed_scaling_factor", 1.0, "asked"),
        ("n_group", 4, "asked"),
        ("topk_group", 2, "asked"),
        ("norm_topk_prob", False, "asked"),
        ("rope_theta", 5e5, "asked"),
        ("rope_interleave", False, "asked"),
        ("eos_token_id", [0, 3], "asked"),
        ("first_k_dense_replace", 0, "never"),
        ("n_shared_experts", 2, "never"),
        ("q_lora_rank", None, "never"),
        ("v_head_dim", 16, "never"),
        ("num_nextn_predict_layers", 1, "never"),
        ("pretraining_tp", 2, "free"),
    ],
)
def test_a_key_of_another_family_has_the_answer_of_what_it_does(
    name: str, value: object, answer: str
) -> None:
    old = DecoderConfig.from_dict(DEEPSEEK)
    new = DecoderConfig.from_dict({**DEEPSEEK, name: value})
    (change,) = model_changes(old, new)
    assert (change.name, change.new, change.on_resume) == (f"model.{name}", value, answer)
    assert model_changes(new, new) == []


def test_keys_that_only_make_sense_together_are_judged_together() -> None:
    old = DecoderConfig.from_dict(DEEPSEEK)
    both = {"num_hidden_layers": 3, "rope_theta": 5.0}
    found = model_changes(old, DecoderConfig.from_dict({**DEEPSEEK, **both}))
    assert {c.name: c.on_resume for c in found} == {
        "model.num_hidden_layers": "never",
        "model.rope_theta": "asked",
    }


def test_a_key_to_allow_that_does_not_exist_is_refused(
    configure: Configure, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(f"train.output_dir={trained_run}")
    with pytest.raises(
        ValueError, match=r"^--allow-change train\.sed: no such key; .*train\.seed\?"
    ):
        check(config, "latest", ["train.sed"])
    assert check(config, "latest", ["train.seed"])
    assert "  --allow-change train.seed: it did not change" in capsys.readouterr().out


def test_a_checkpoint_without_a_readable_job_is_compared_by_its_state(
    configure: Configure, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "checkpoint-2"
    shutil.copytree(trained_run / "checkpoint-2", source)
    (source / "moe_train.toml").write_text("[train]\nwave = 1\n")
    (source / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"train\.seed: 0 -> 9: .*--allow-change train\.seed$"):
        check(configure("train.seed=9"), str(source))
    assert "cannot be read as a job, so its keys are not compared" in capsys.readouterr().out


def test_every_key_says_whether_it_may_change() -> None:
    answers = {key.full_name: key.on_resume for key in all_keys()}
    assert set(answers.values()) <= {"free", "compared", "asked", "never"}
    for table in ("parallel", "log", "checkpoint"):
        assert {answers[n] for n in answers if n.startswith(f"{table}.")} == {"free"}
    ways = {"route", "ranks_per_node", "chunks", "backend"}  # of tokens, which change no number
    free = {f"moe.dispatch_{way}" for way in ways}
    free |= {"moe.shared_expert_overlap", "moe.record_routing"}
    of_moe = {name for name in answers if name.startswith("moe.")}
    assert {name for name in of_moe if answers[name] == "free"} == free
    assert {answers[name] for name in of_moe - free} == {"asked"}


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["train.max_steps=4"],
            [
                "learning rate: cosine to 0.001 at step 2, then held until step 4 "
                "(optimizer.on_extend=constant, or restretch or rewarm)"
            ],
        ),
        (
            ["train.max_steps=4", "optimizer.on_extend=restretch"],
            [
                "learning rate of step 3: 0.00231802 instead of 0.001",
                "learning rate: cosine to 0.001 at step 4 (optimizer.on_extend=restretch, "
                "or constant or rewarm)",
            ],
        ),
        (
            ["train.max_steps=8", "optimizer.on_extend=rewarm", "optimizer.warmup_steps=2"],
            [
                "learning rate of step 3: 0.0055 instead of 0.001",
                "learning rate: cosine to 0.001 at step 8 (optimizer.on_extend=rewarm, "
                "or constant or restretch)",
            ],
        ),
    ],
)
def test_what_becomes_of_the_learning_rate_is_said(
    configure: Configure,
    trained_run: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    lines: list[str],
) -> None:
    check(configure(f"train.output_dir={trained_run}", *overrides), "latest")
    said = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in said if line.strip().startswith("learning rate")] == lines


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["train.dtype=bfloat16", "train.master_weights=true"],
            ["master weights: begin as the float32 weights of the checkpoint"],
        ),
        (["train.dtype=bfloat16"], ["optimizer moments: converted from float32 to bfloat16"]),
        (["train.dtype=bfloat16", "train.stochastic_rounding=true"], []),
        (['train.trainable=["*norm*"]'], []),
    ],
)
def test_what_becomes_of_the_weights_is_said(
    configure: Configure,
    trained_run: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    lines: list[str],
) -> None:
    check(configure(f"train.output_dir={trained_run}", *overrides), "latest")
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [
        line for line in said if line.split(":")[0].split()[-1] in ("weights", "moments")
    ] == lines


def test_what_was_frozen_before_is_said_to_start_without_moments(configure: Configure) -> None:
    own = configure('train.trainable=["model.norm.weight"]')
    model = read_model_config(own)
    assert _moment_notes(own, configure('train.trainable=["*norm*"]'), model)[0].endswith(
        "frozen before: model.layers.0.input_layernorm.weight, model.layers.0.post_attention_"
        "layernorm.weight, model.layers.0.self_attn.k_norm.weight (8 in all)"
    )
    assert _moment_notes(own, own, model) == _moment_notes(configure(), own, model) == []


def test_what_another_algorithm_updated_is_said_to_start_without_moments(
    configure: Configure,
) -> None:
    own, group = configure(), "param_groups.a.parameters=*.mlp.gate.weight"
    muon = configure("optimizer.name=muon", group, "param_groups.a.algorithm=adamw")
    (line,) = _moment_notes(own, muon, read_model_config(own))
    assert "another algorithm updated before: model.layers.0.mlp.experts.down_proj, " in line
    assert line.endswith("(12 in all)"), "two layers of four and two matrices, without routers"


def test_the_job_that_allowed_a_change_goes_on_without_asking_again(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    """As the checkpoint that it writes carries the changed job."""
    source = tmp_path / "checkpoint-2"
    shutil.copytree(trained_run / "checkpoint-2", source)
    own = source / "moe_train.toml"
    config = configure("train.seed=9")
    with pytest.raises(ValueError, match=r"train\.seed"):
        check(config, str(source))
    own.write_text(own.read_text().replace("seed = 0", "seed = 9"))
    state = json.loads((source / "trainer_state.json").read_text())
    (source / "trainer_state.json").write_text(json.dumps({**state, "seed": 9}))
    (source / "manifest.json").unlink()
    assert load_config(own).train.seed == 9
    assert check(config, str(source)) == source
