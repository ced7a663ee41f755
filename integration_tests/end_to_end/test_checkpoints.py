"""A checkpoint of any layout is a transformers checkpoint, and resumes under any other layout."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_train.checkpoint import TrainerState, export, training_state
from moe_train.config import Config, dump_toml, load_config
from moe_train.config.renames import FORMER_VALUES, RENAMED_KEYS
from moe_train.generation import load_model
from moe_train.inference.generate import generate_text
from moe_train.jobs import describe_checkpoint, job
from weight_convert import convert

LAYOUTS = {
    "one": (),
    "pp2 ep2": ("parallel.pp=2", "parallel.ep=2"),
    "dp4": ("parallel.dp=4",),
    "dp2 ep2 f-then-b": (
        "parallel.dp=2",
        "parallel.ep=2",
        "parallel.schedule=forward_then_backward",
    ),
}


@pytest.mark.parametrize("layout", ["one", "pp2 ep2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_opens_the_checkpoint_with_every_key_and_the_same_logits(
    configure: Callable[..., Config],
    tmp_path: Path,
    layout: str,
    dtype: str,
    train: Callable[..., None],
) -> None:
    overrides = ["train.max_steps=2", f"train.dtype={dtype}"]
    if dtype == "bfloat16":
        overrides.append("train.master_weights=true")
    train(configure(*LAYOUTS[layout], *overrides, model_changes={"mlp_only_layers": [2]}))
    folder = tmp_path / "run" / "checkpoint-2"
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert model.dtype == getattr(torch, dtype)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], (problem, report[problem])
    tokens = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits.float()
        ours = load_model(folder)
        positions = torch.arange(40).expand(3, 40)
        hidden, _ = ours.hidden_states(tokens, positions)
        tolerance = 1e-5 if dtype == "float32" else 0.06
        torch.testing.assert_close(ours.logits(hidden).float(), expected, rtol=0, atol=tolerance)


def test_the_checkpoint_holds_what_inference_needs(
    configure: Callable[..., Config], tmp_path: Path, train: Callable[..., None]
) -> None:
    train(configure("train.max_steps=1"))
    folder = tmp_path / "run" / "checkpoint-1"
    text = "def f(x):\n    return x  # done\n"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 0
    summary = describe_checkpoint(tmp_path / "run")
    assert "4 layers" in summary and "step 1" in summary and "optimizer" in summary
    greedy = generate_text(folder, text, max_new_tokens=8, temperature=0, top_k=0, seed=0)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert greedy == tokenizer.decode(answer[0], skip_special_tokens=True)
    values = json.loads((folder / "config.json").read_text())
    values["eos_token_id"] = [0, int(answer[0, ids.shape[1]])]
    (folder / "config.json").write_text(json.dumps(values))
    assert generate_text(folder, text, max_new_tokens=8, temperature=0, top_k=0, seed=0) == text


def test_checkpoints_of_transformers_and_of_other_programs_start_training_directly(
    configure: Callable[..., Config],
    tmp_path: Path,
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
) -> None:
    first = configure("train.max_steps=1")
    train(first)
    again = tmp_path / "again"
    for of_kind in (AutoModelForCausalLM, AutoTokenizer):
        of_kind.from_pretrained(tmp_path / "run" / "checkpoint-1").save_pretrained(again)
    convert(again, tmp_path / "foreign", to="megatron")
    before = AutoModelForCausalLM.from_pretrained(again).state_dict()
    found = []
    for start, degrees in ((again, "parallel.pp=2"), (tmp_path / "foreign", "parallel.pp=1")):
        out = tmp_path / f"from-{start.name}"
        train(
            configure(
                f"model.init_from={start}",
                "train.max_steps=1",
                f"train.output_dir={out}",
                "optimizer.lr=1e-30",
                degrees,
            )
        )
        after = AutoModelForCausalLM.from_pretrained(out / "checkpoint-1").state_dict()
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert torch.equal(tensor, after[key]), key
        found.append(losses(out)[1])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def former_toml(config: Config) -> str:
    """The job as it was written when its keys had other names, and each was always there."""
    tables = tomllib.loads(dump_toml(config))
    for former, name in RENAMED_KEYS.items():
        table, key = name.split(".")
        if former.startswith(f"{table}."):
            tables[table][former.split(".")[1]] = tables[table].pop(key, FORMER_VALUES.get(name))
    for name, (value, present) in FORMER_VALUES.items():
        table, key = name.split(".")
        key = {new: old for old, new in RENAMED_KEYS.items()}.get(name, name).split(".")[1]
        if tables[table].get(key, present) in (present, (value, present)):
            tables[table][key] = value
    return "\n".join(
        f"{table}.{key} = {json.dumps(value).replace('Infinity', 'inf')}"
        for table, values in tables.items()
        for key, value in values.items()
    )


def former_random_state(rank: int) -> dict[str, bytes]:
    states = {"cpu": torch.get_rng_state()}
    return {f"rng-rank-{rank:05d}.safetensors": safetensors.torch.save(states)}


def former_state(state: TrainerState) -> bytes:
    """What `trainer_state.json` said before it had a version."""
    names = ("step", "consumed_samples", "data_fingerprint", "sequence_length", "seed")
    return json.dumps({name: getattr(state, name) for name in names}).encode()


def test_a_checkpoint_with_former_keys_resumes_from_its_own_file(
    configure: Callable[..., Config],
    tmp_path: Path,
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ("train.max_steps=4", "parallel.pp=2", "optimizer.max_grad_norm=inf")
    train(configure(*base, f"train.output_dir={tmp_path / 'whole'}"))
    with monkeypatch.context() as former:
        former.setattr(export, "dump_toml", former_toml)
        former.setattr(training_state, "random_state_files", former_random_state)
        former.setattr(TrainerState, "to_json", former_state)
        train(configure(*base, "checkpoint.interval_steps=2"))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    text = (checkpoint / "moe_train.toml").read_text()
    for key in RENAMED_KEYS.keys() - {"model.router_aux_loss_scope"}:
        assert f"{key} = " in text
    assert "version" not in (checkpoint / "trainer_state.json").read_text()
    assert "data.max_bytes = 0" in text and "optimizer.max_grad_norm = 0" in text
    assert 'scope = "micro_batch"' in text and "moe_aux_loss_coeff = -1" in text
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(checkpoint, again / "checkpoint-2")
    own = load_config(checkpoint / "moe_train.toml", [f"train.output_dir={again}"])
    train(own, resume="latest")
    whole = losses(tmp_path / "whole")
    assert losses(again) == {3: whole[3], 4: whole[4]}


@pytest.mark.parametrize(
    ("layout", "dtype", "name"),
    [("one", "float32", "muon"), ("pp2 ep2", "float32", "adamw"), ("one", "bfloat16", "adamw")],
)
def test_resume_on_the_same_layout_repeats_the_losses_bit_for_bit(
    configure: Callable[..., Config],
    tmp_path: Path,
    layout: str,
    dtype: str,
    name: str,
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
) -> None:
    base = [*LAYOUTS[layout], "train.max_steps=8", "checkpoint.interval_steps=3"]
    base += [
        f"optimizer.name={name}",
        f"train.dtype={dtype}",
        f"train.master_weights={str(dtype == 'bfloat16').lower()}",
    ]
    train(configure(*base, f"train.output_dir={tmp_path / 'whole'}"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoint-8")
    config = configure(*base, f"train.output_dir={tmp_path / 'parts'}")
    train(config, resume="latest")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(whole) == 8
    assert whole == parts


def test_resume_under_other_layouts_continues_within_a_millionth(
    configure: Callable[..., Config],
    tmp_path: Path,
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
) -> None:
    """The learning rate is moderate: layouts agree within 1e-7 until rounding moves a token whose
    second and third expert are all but tied, a step of 1e-6 that no arithmetic in fp32 avoids.
    """
    base = ["train.max_steps=16", "checkpoint.interval_steps=4", "checkpoint.save_total_limit=9"]
    base.append("optimizer.lr=1e-3")

    def config(name: str, layout: str) -> Config:
        return configure(*base, *LAYOUTS[layout], f"train.output_dir={tmp_path / name}")

    train(config("whole", "pp2 ep2"))
    train(config("one", "one"), resume=str(tmp_path / "whole" / "checkpoint-4"))
    train(config("four", "dp4"), resume=str(tmp_path / "one" / "checkpoint-8"))
    train(config("back", "dp2 ep2 f-then-b"), resume=str(tmp_path / "four" / "checkpoint-12"))
    whole = losses(tmp_path / "whole")
    for name, first in (("one", 5), ("four", 9), ("back", 13)):
        resumed = losses(tmp_path / name)
        assert sorted(resumed) == list(range(first, 17))
        for step, loss in resumed.items():
            if step < first + 10:
                assert abs(loss - whole[step]) <= 1e-6 * whole[step], (name, step)


def test_resuming_on_other_data_is_refused(
    configure: Callable[..., Config], tmp_path: Path, train: Callable[..., None]
) -> None:
    train(configure("train.max_steps=1"))
    with pytest.raises(ValueError, match=r"train\.seed: 3 -> 4: .*--allow-change train\.seed$"):
        job.check(configure("train.seed=4", "train.max_steps=2"), "latest")
    (tmp_path / "corpus" / "new.py").write_text("x = 1\n" * 500)
    with pytest.raises(ValueError, match=r"data\.corpus: text \w+ -> text"):
        job.check(configure("train.max_steps=2"), "latest")


def test_what_a_later_save_could_not_replace_is_refused_before_training(
    configure: Callable[..., Config], tmp_path: Path, train: Callable[..., None]
) -> None:
    train(configure("train.max_steps=1"))
    torn = tmp_path / "run" / "checkpoint-3"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half a copy")
    with pytest.raises(ValueError, match=r"checkpoint-3 is no complete .*step 3; move it away"):
        job.check(configure("train.max_steps=4"), "latest")
    assert job.check(configure("train.max_steps=2"), "latest") == tmp_path / "run" / "checkpoint-1"
