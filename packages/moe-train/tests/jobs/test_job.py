"""What is refused before a rank starts, and what a rank's job does from its start to its end."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_train.checkpoint import read_state
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.jobs.job import check, check_model, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from moe_train.training import read_model_config
from ranktest import run_ranks

Configure = Callable[..., Config]

REFUSED = {
    "layers": (
        ["parallel.pp=3"],
        {},
        "num_hidden_layers=2 is not divisible by parallel.pp=3 stages; choose pp among 1, 2, or in "
        'training set parallel.layer_split="cost"',
    ),
    "experts": (
        ["parallel.ep=4", "train.global_batch_size=16"],
        {},
        "parallel.ep=4 ranks cannot share num_experts=6 evenly; choose ep among 1, 2, 3, 6, or "
        "in training give uneven parts by parallel.expert_parts",
    ),
    "positions": (
        ["data.sequence_length=65"],
        {},
        "data.sequence_length=65 exceeds the model's max_position_embeddings=64; shorten the "
        "sequences",
    ),
    "patterns": (
        ['train.trainable=["lm_hed.weight"]'],
        {},
        "train.trainable: 'lm_hed.weight' matches no parameter; the nearest names are "
        "lm_head.weight",
    ),
    "vocabulary": (
        [],
        {"vocab_size": 258},
        "the tokenizer has {size} tokens but the model's vocab_size=258; lower "
        "tokenizer.vocab_size to 258 or use a model config with a larger vocabulary",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_does_not_fit_is_refused_with_the_numbers_and_the_remedy(
    configure: Configure, mistake: str
) -> None:
    overrides, model_changes, message = REFUSED[mistake]
    config = configure(*overrides, **model_changes)
    expected = message.replace("{size}", str(prepare(config).vocab_size))
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check(config, "")


def test_a_split_too_short_for_one_sequence_is_refused(configure: Configure) -> None:
    config = configure("data.sequence_length=700", max_position_embeddings=4096)
    with pytest.raises(
        ValueError,
        match=r"^validation.bin has \d+ tokens, but one sequence of data.sequence_length=700 needs "
        "701; use more text",
    ):
        check(config, "")


def test_the_model_is_checked_before_any_text_is_read(configure: Configure) -> None:
    wrong = ("parallel.ep=4", "train.global_batch_size=16")
    with pytest.raises(ValueError, match="num_experts=6"):
        check(configure(*wrong, "data.corpus=nowhere"), "")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check(configure("data.corpus=nowhere"), "")


def test_every_layout_that_divides_is_accepted(configure: Configure) -> None:
    accepted = []
    for pp in (1, 2, 3):
        for ep in (1, 2, 3, 4, 6):
            sizes = (f"parallel.pp={pp}", f"parallel.ep={ep}", "train.global_batch_size=24")
            config = configure(*sizes)
            try:
                check_model(config, read_model_config(config))
            except ValueError:
                continue
            accepted.append((pp, ep))
    assert accepted == [(pp, ep) for pp in (1, 2) for ep in (1, 2, 3, 6)]


def test_a_new_run_gets_its_corpus_before_it_starts_and_no_folder_yet(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(f"data.cache_dir={tmp_path / 'cache'}")
    assert check(config, "") is None
    assert not (tmp_path / "run").exists()
    made = prepare(config).sources[0].train
    stamp = made.stat().st_mtime_ns
    assert check(config, "") is None
    assert made.stat().st_mtime_ns == stamp


def test_a_folder_with_checkpoints_is_resumed_or_left_alone(
    configure: Configure, trained_run: Path
) -> None:
    config = configure(f"train.output_dir={trained_run}")
    message = (
        f"train.output_dir={trained_run} already holds checkpoints; pass --resume to continue that "
        "run, or choose another folder"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(config, "")
    assert check(config, "latest") == trained_run / "checkpoint-2"
    assert check(config, str(trained_run / "checkpoint-2")) == trained_run / "checkpoint-2"


def test_a_run_that_has_its_steps_already_is_refused(
    configure: Configure, trained_run: Path
) -> None:
    config = configure(f"train.output_dir={trained_run}", "train.max_steps=2")
    said = f"{trained_run}/checkpoint-2 is at step 2 and train.max_steps=2; raise train.max_steps"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        check(config, "latest")


def test_a_resume_without_a_checkpoint_is_refused(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    none = f"--resume: {tmp_path}/run holds no complete checkpoint; start without --resume"
    with pytest.raises(ValueError, match=f"^{re.escape(none)}"):
        check(config, "latest")
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoint; move checkpoint-2 away and start without"):
        check(config, "latest")
    message = "--resume nowhere: no such folder; name a checkpoint-N folder"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(config, "nowhere")


def test_a_damaged_or_foreign_checkpoint_is_named(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    shutil.copytree(trained_run / "checkpoint-2", damaged)
    (damaged / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"^--resume: .*optimizer\.safetensors"):
        check(configure(), str(damaged))
    foreign.mkdir()
    with pytest.raises(ValueError, match="foreign"):
        check(configure(), str(foreign))


def test_a_job_trains_to_its_end_and_says_where_the_results_are(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure("parallel.dp=2", "train.max_steps=3")
    check(config, "")

    def run(*_: int) -> object:
        context = RankContext()
        train(config, "", context)
        return context.step, dist.is_initialized()

    assert run_ranks(run, 2) == [(3, False)] * 2
    out = tmp_path / "run"
    said = capfd.readouterr().out.split()
    assert said == ["results:", f"{out}/metrics.jsonl", f"{out}/checkpoint-3"]
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [1, 2, 3, 3]


def resumed(config: Config, resume: str) -> list[object]:
    """Train on from a checkpoint; the finished steps that each rank tells."""
    check(config, resume)

    def run(*_: int) -> int:
        context = RankContext()
        train(config, resume, context)
        return context.step

    return run_ranks(run, config.world_size)


def test_a_resumed_job_begins_behind_its_checkpoint(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    shutil.copytree(trained_run, out)
    config = configure(f"train.output_dir={out}", "parallel.ep=2")
    assert resumed(config, "latest") == [4, 4]
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]
    state = read_state(out / "checkpoint-4")
    assert (state.step, state.consumed_samples) == (4, 48)


def test_a_job_goes_on_from_the_named_checkpoint_in_a_folder_of_its_own(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    config = configure("train.max_steps=3")
    assert resumed(config, str(trained_run / "checkpoint-2")) == [3]
    assert [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [3, 3]
    assert read_state(tmp_path / "run/checkpoint-3").consumed_samples == 36


def test_a_resume_behind_other_checkpoints_of_its_folder_says_what_becomes_of_them(
    configure: Configure, trained_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "again"
    shutil.copytree(trained_run, out)
    config = configure(f"train.output_dir={out}", "checkpoint.save_total_limit=9")
    resumed(config, str(out / "checkpoint-2"))
    for resume, is_told in ((out / "checkpoint-2", True), (out, False)):
        caplog.clear()
        check(replace(config, train=replace(config.train, max_steps=6)), str(resume))
        told = f"{out} holds checkpoint-4, of later steps than {out}/checkpoint-2: until this run"
        assert (told in caplog.text) == is_told


def test_layers_for_further_tokens_may_be_trained_from_a_resume_on(
    configure: Configure, tmp_path: Path, of_family: Callable[[str], Any]
) -> None:
    """Their weights are in the checkpoint of a job that did not train them, and no moments."""
    keys, model = of_family("deepseek_v3")

    def run(folder: str, resume: str, *more: str, allow: Sequence[str] = ()) -> None:
        config = configure(*keys, f"train.output_dir={tmp_path / folder}", *more, **model)
        source = check(config, resume, allow)
        run_ranks(lambda *_: train(config, str(source or ""), RankContext()), 1)

    run("first", "", "train.max_steps=1")
    begin = f"model.init_from={tmp_path / 'first' / 'checkpoint-1'}"
    run("then", "", begin, "train.max_steps=1", "train.mtp_loss_coef=0")
    asked = [begin, "train.max_steps=2", "train.mtp_loss_coef=0.3"]
    run("then", "latest", *asked, allow=["train.mtp_loss_coef"])
    assert (tmp_path / "then" / "checkpoint-2").is_dir()


def test_what_stands_where_a_later_save_goes_is_refused_before_training(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    shutil.copytree(trained_run, out)
    (out / "checkpoint-3").mkdir()
    (out / "checkpoint-3" / "model.safetensors").write_bytes(b"half a copy")
    with pytest.raises(ValueError, match=r"again/checkpoint-3 .*move it away"):
        check(configure(f"train.output_dir={out}"), "latest")
    assert check(configure(f"train.output_dir={trained_run}"), "latest") is not None


def test_a_job_that_starts_from_weights_counts_from_the_first_step(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    config = configure(f"model.init_from={trained_run / 'checkpoint-2'}", "train.max_steps=1")
    check(config, "")

    def run(*_: int) -> int:
        context = RankContext()
        train(config, "", context)
        return context.step

    assert run_ranks(run, 1) == [1]
    (first, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["consumed_samples"]) == (1, 12)
    before = next(read_metrics(trained_run / "metrics.jsonl"))
    assert first["loss"] < before["loss"] - 0.01, "the same sequences, with trained weights"


def test_auto_tells_in_one_line_that_four_ranks_of_a_machine_with_one_card_train_on_the_cpu(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check(configure("train.device=auto", "parallel.dp=4", "train.global_batch_size=16"), "")
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == (
        "warning: train.device='auto' trains on the CPU: this machine has fewer CUDA devices (1) "
        "than ranks; start fewer ranks to use them"
    )


def test_keys_that_do_nothing_without_another_one_are_told_or_refused(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["train.loss_spike_window=8", "train.max_skipped_steps=2", "checkpoint.node_copies=2"]
    keys += ["checkpoint.ema_interval_steps=5", "checkpoint.node_interval_steps=7"]
    keys += ["optimizer.decay_steps=60", "optimizer.min_lr_ratio=0.5"]
    keys += ['optimizer.wsd_decay_style="linear"', "optimizer.muon_momentum=0.5"]
    keys += ['moe.dispatch_route="dedup"', 'moe.token_drop_policy="position"']
    keys += ["moe.expert_bias_update_rate=0.01"]
    others = ["optimizer.decay=constant", "optimizer.warmup_steps=50", "parallel.relayout=4: dp=1"]
    check(configure(*keys, *others), "")
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    for key in keys:
        (line,) = (line for line in told if f"{key} does nothing without" in line)
    assert line.endswith("without moe.update_expert_bias=true")
    assert any("relayout=['4: dp=1'] is past the last step, train.max_steps=4" in x for x in told)
    assert any("warmup_steps=50 are more than train.max_steps=" in line for line in told)
    with pytest.raises(ValueError, match='on_loss_spike="skip" leaves out no update without'):
        configure("train.on_loss_spike=skip")


def test_a_group_of_parameters_that_are_all_frozen_is_told(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [
        'param_groups.router.parameters=["*.mlp.gate.weight"]',
        "param_groups.router.lr_ratio=2",
    ]
    groups += ['param_groups.norms.parameters=["*norm.weight"]', "param_groups.norms.lr_ratio=0.5"]
    check(configure(*groups, 'train.trainable=["!*.mlp.gate.weight"]'), "")
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == (
        "warning: [param_groups.router] does nothing: train.trainable leaves out all it chooses"
    )


def test_what_the_cpu_cannot_do_is_refused_and_what_it_need_not_is_a_line(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["train.offload_activations", "train.offload_optimizer"]
    keys += ["train.gradient_accumulation_fusion", "train.master_weights"]
    more = ["train.dtype=bfloat16", "parallel.cp_attention=ring"]
    check(configure(*(f"{key}=true" for key in keys), *more), "")
    fused = configure("train.gradient_accumulation_fusion=true", "parallel.sharding=2")
    check(fused, "")
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in told if "offload_activations=true does nothing on the CPU" in line]
    assert [line for line in told if "offload_optimizer=true saves nothing on the CPU" in line]
    assert [line for line in told if "fusion=true does nothing with train.master_weights" in line]
    assert [line for line in told if "fusion=true does little with parallel.sharding=2" in line]
    assert [line for line in told if 'cp_attention="ring" does nothing with parallel.cp=1' in line]
    assert len(told) == 5
    with pytest.raises(ValueError, match="experts_fp8=true needs CUDA devices"):
        check(configure("model.experts_fp8=true", "train.dtype=bfloat16"), "")
    with pytest.raises(ValueError, match=r"recompute_keep names 'mm', which is no operation"):
        check(configure("train.recompute=selective", 'train.recompute_keep=["mm"]'), "")


def test_states_go_to_the_host_and_back_between_two_runs_of_a_job(
    configure: Configure, tmp_path: Path
) -> None:
    def run(name: str, resume: str, steps: int, *keys: str) -> list[float]:
        low = ("train.dtype=bfloat16", "train.master_weights=true", "parallel.dp=2")
        place = f"train.output_dir={tmp_path}/{name}"
        config = configure(
            *low, place, f"train.max_steps={steps}", "optimizer.decay_steps=4", *keys
        )
        check(config, resume)
        run_ranks(lambda *_: train(config, resume, RankContext()), 2)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return [line["loss"] for line in lines if "loss" in line]

    straight = run("straight", "", 4)
    run("changed", "", 2, "train.offload_optimizer=true")
    run("changed", "latest", 3)
    found = run("changed", "latest", 4, "train.offload_optimizer=true", "parallel.sharding=1")
    assert found == straight and len(found) == 4
