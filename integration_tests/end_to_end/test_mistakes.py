"""What people get wrong: each mistake is one clear line and exit code 2; nothing is left behind.

Those of `EARLY` are answered before torch is imported. What changes a folder is a file that the
mistake needs; everything else there is the same before and after.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from moe_train.cli import main
from moe_train.config import load_config
from workspace import ROOT

Files = Mapping[str, str]
Job = Callable[..., Path]


class Mistake(NamedTuple):
    """Arguments behind `train JOB` ("@" stands for the job's folder), and what has to be said.

    `files` are written into the job's folder first; `model` changes its config.json.
    """

    arguments: list[str]
    said: str
    files: Files = MappingProxyType({})
    model: Mapping[str, object] = MappingProxyType({})


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "2",
}
EARLY = {
    # the configuration
    "unknown key": Mistake(["train.max_stepz=3"], "did you mean train.max_steps?"),
    "key of another table": Mistake(["train.lr=1"], "did you mean optimizer.lr?"),
    "unknown table": Mistake(["trian.max_steps=3"], "unknown table trian in"),
    "no table": Mistake(["max_steps=3"], "names no table; did you mean train.max_steps?"),
    "former key": Mistake(["moe.moe_z_loss_coeff=1"], "moe.z_loss_coef"),
    "required key taken out": Mistake(["optimizer.lr="], "lacks optimizer.lr (peak learning rate)"),
    "word for a number": Mistake(["train.max_steps=many"], "train.max_steps must be int"),
    "fraction for a count": Mistake(["train.max_steps=2.5"], "train.max_steps must be int"),
    "text for a list": Mistake(["data.extensions=[1]"], "data.extensions must be list of str"),
    "number for a flag": Mistake(["log.plots=1"], "log.plots must be bool"),
    "too small": Mistake(["train.max_steps=0"], "must be at least 1"),
    "too large": Mistake(["optimizer.beta1=1"], "it must be at most 0.999999"),
    "not a number": Mistake(["optimizer.lr=nan"], "optimizer.lr=nan is not a finite number"),
    "unknown choice": Mistake(["optimizer.decay=cos"], 'must be one of "cosine", "linear"'),
    "empty text": Mistake(['train.output_dir=""'], "train.output_dir is empty"),
    "empty corpus list": Mistake(["data.corpus=[]"], "data.corpus=[] names no text"),
    "no model": Mistake(["model.config_file="], "[model] names no model"),
    "masters of float32": Mistake(["train.master_weights=true"], "has no use with train.dtype="),
    "weight of a source": Mistake(
        ["data.corpus=", "sources.a.corpus=@/corpus", "sources.a.weight=-1"],
        "sources.a.weight=-1.0 is too small",
    ),
    "sources beside a corpus": Mistake(["sources.a.corpus=@/corpus"], "data.corpus"),
    "source without a corpus": Mistake(["sources.a.weight=2"], "corpus"),
    # the layout
    "layers": Mistake(
        ["parallel.pp=3"],
        "num_hidden_layers=4 is not divisible by parallel.pp=3 stages; choose pp among 1, 2, 4",
    ),
    "experts": Mistake(
        ["parallel.ep=3"],
        "parallel.ep=3 ranks cannot share num_experts=8 evenly; choose ep among 1, 2, 4, 8",
    ),
    "experts of another family": Mistake(
        ["parallel.ep=4"],
        "cannot share num_experts=6",
        model={"model_type": "mixtral", "num_experts": None, "num_local_experts": 6},
    ),
    "batch": Mistake(["parallel.dp=3"], "train.global_batch_size=16 does not divide by"),
    "microbatches": Mistake(["train.gradient_accumulation_steps=3"], "choose 15 or 18"),
    "positions": Mistake(["data.sequence_length=257"], "max_position_embeddings=256; shorten"),
    # files that are named
    "no model file": Mistake(["model.config_file=@/no.json"], "config_file=@/no.json does not"),
    "no checkpoint folder": Mistake(["model.init_from=@/no"], "init_from=@/no does not exist"),
    "folder without a model": Mistake(["model.init_from=@/corpus"], "holds no config.json"),
    "model file not JSON": Mistake(
        ["model.config_file=@/bad.json"], "cannot read the model config", {"bad.json": "{'a': 1}"}
    ),
    "model file a list": Mistake(
        ["model.config_file=@/bad.json"], "is not a JSON object", {"bad.json": "[]"}
    ),
    "no tokenizer file": Mistake(["tokenizer.file=@/no.json"], "tokenizer.file=@/no.json does not"),
    "no corpus": Mistake(["data.corpus=@/no"], "corpus '@/no' does not exist; name a folder"),
    "glob without a match": Mistake(["data.corpus=@/*.rst"], "corpus '@/*.rst' does not exist"),
    "corpus of a source": Mistake(
        ["data.corpus=", "sources.a.corpus=@/corpus", "sources.b.corpus=@/no"], "'@/no' does not"
    ),
    # the run folder
    "run folder is a file": Mistake(
        ["train.output_dir=@/notes"], "train.output_dir=@/notes is a file", {"notes": "kept"}
    ),
    "run folder below a file": Mistake(
        ["train.output_dir=@/notes/run"], "cannot be made, @/notes is a file", {"notes": "kept"}
    ),
    "run folder not writable": Mistake(["train.output_dir=/proc/run"], "/proc/run is not writable"),
    "run folder of another run": Mistake(
        ["train.output_dir=@/old"], "already holds checkpoints", {"old/checkpoint-3/x": "kept"}
    ),
}
SIZES = {
    "too few tasks": (SLURM, "WORLD_SIZE=2 ranks were started by srun, but parallel.pp=2"),
    "a rank that is no number": ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
    "hosts that cannot be read": (
        {**SLURM, "SLURM_STEP_NODELIST": "n[1-"},
        "set MASTER_ADDR to the host of rank 0",
    ),
}
LATE = {
    # the model
    "model type": Mistake([], "'llama'", model={"model_type": "llama"}),
    "missing size": Mistake([], "missing num_attention_heads", model={"num_attention_heads": None}),
    "size of a wrong type": Mistake([], "hidden_size='32'", model={"hidden_size": "32"}),
    "activation": Mistake([], "hidden_act='gelu'", model={"hidden_act": "gelu"}),
    "quantised weights": Mistake(
        [], "quantization_config", model={"quantization_config": {"a": 1}}
    ),
    "expert bias of a family without": Mistake(["moe.update_expert_bias=true"], "expert_bias"),
    "scope of the schedule": Mistake(
        ["moe.aux_loss_scope=global_batch"], "parallel.schedule", model={"router_aux_loss_coef": 1}
    ),
    "no card": Mistake(["train.device=cuda"], "torch sees no CUDA device"),
    # the text and the tokenizer
    "folder without text": Mistake(['data.extensions=".txt"'], "has no files (.txt)"),
    "empty folder": Mistake(["data.corpus=@/empty"], "it is empty", {"empty/.keep": ""}),
    "binary file": Mistake(["data.corpus=@/x.py"], "x.py", {"x.py": "\0\0binary\0"}),
    "row that is not JSON": Mistake(
        ["data.corpus=@/x.jsonl"], "x.jsonl", {"x.jsonl": '{"text": "a"}\n{"text": \n'}
    ),
    "row without the field": Mistake(
        ["data.corpus=@/x.jsonl"], "text", {"x.jsonl": '{"text": "a b"}\n{"body": "c"}\n' * 9}
    ),
    "field of a wrong type": Mistake(
        ["data.corpus=@/x.jsonl"], "expected text", {"x.jsonl": '{"text": 3}\n{"text": 4}\n' * 9}
    ),
    "damaged archive": Mistake(
        ["data.corpus=@/x.jsonl.gz"], "cannot be unpacked", {"x.jsonl.gz": "no gzip"}
    ),
    "conversation without a tokenizer": Mistake(
        ["data.corpus=@/x.jsonl", "data.kind=chat"],
        "there is no text to train a tokenizer on",
        {"x.jsonl": '{"messages": []}\n' * 9},
    ),
    "tokens without a tokenizer": Mistake(
        ["data.corpus=@/x.bin", "data.kind=tokens"],
        "no tokenizer is given",
        {"x.bin": "abcdefgh" * 99},
    ),
    "training on pairs": Mistake(
        ["data.kind=preference", "data.corpus=@/x.jsonl"],
        "there is no training on pairs yet",
        {"x.jsonl": '{"chosen": "a", "rejected": "b"}\n' * 9},
    ),
    "tokenizer larger than the model": Mistake([], "vocab_size=300", model={"vocab_size": 300}),
    "tokenizer not JSON": Mistake(
        ["tokenizer.file=@/t.json"], "cannot be read as a tokenizer", {"t.json": "{"}
    ),
    "short text": Mistake(
        ["data.corpus=@/short"], "data.sequence_length=32", {"short/a.py": "a", "short/b.py": "b"}
    ),
    # resuming
    "nothing to resume": Mistake(["--resume"], "holds no complete checkpoint"),
    "no such checkpoint": Mistake(["--resume", "@/no"], "no such folder"),
    "a folder that is no checkpoint": Mistake(["--resume", "@/corpus"], "corpus"),
}


def fill(folder: Path, mistake: Mistake) -> tuple[list[str], str]:
    """Write the mistake's files; its arguments and its message for this folder."""
    for name, text in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    given = [argument.replace("@", str(folder)) for argument in mistake.arguments]
    return given, mistake.said.replace("@", str(folder))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder, but for what the cache keeps."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*")}
    return {name: p.read_bytes() if p.is_file() else None for name, p in sorted(found.items())}


def only_line(stderr: str) -> str:
    """The message of the command, behind which nothing stands."""
    said = [line for line in stderr.splitlines() if line.startswith("moe-train: ")]
    assert len(said) == 1 and "Traceback" not in stderr, stderr
    assert stderr.rstrip().endswith(said[0]), stderr
    return said[0]


WITHOUT_TORCH = """
import contextlib, io, json, sys
from moe_train.cli import main
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    late = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), late]))
"""


def test_early_mistakes_are_answered_before_torch_is_imported(job: Job, tmp_path: Path) -> None:
    """All in one process, whose modules are looked at after each."""
    calls, expected = [], []
    job()
    for name, mistake in EARLY.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(tmp_path / "corpus", folder / "corpus")
        shutil.copy(tmp_path / "job.toml", folder)
        config = json.loads((tmp_path / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **mistake.model}))
        given, said = fill(folder, mistake)
        calls.append(["train", str(folder / "job.toml"), *given])
        expected.append((folder, said, contents(folder)))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for name, (folder, said, before), (code, out, err, late) in zip(
        EARLY, expected, answers, strict=True
    ):
        assert said in only_line(err), (name, err)
        assert (code, out, late) == (2, "", []), name
        assert contents(folder) == before, name


@pytest.mark.parametrize("name", LATE)
def test_a_mistake_is_one_line_before_any_rank_starts(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    mistake = LATE[name]
    toml = job(**mistake.model)
    given, said = fill(tmp_path, mistake)
    before = contents(tmp_path)
    assert main(["train", str(toml), *given]) == 2
    assert said in only_line(capfd.readouterr().err)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", SIZES)
def test_tasks_that_cannot_join_are_one_line(
    job: Job,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    variables, said = SIZES[name]
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    toml = job()
    before = contents(tmp_path)
    assert main(["train", str(toml), "parallel.pp=2", "parallel.ep=2"]) == 2
    assert said in only_line(capfd.readouterr().err)
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the guide, with tokenizer and chat template. Only to be copied."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    runpy.run_path(str(ROOT / "examples" / "make_tiny_moe.py"))["main"](str(folder))
    return folder


def talk(*messages: object) -> Files:
    """A file of conversations whose last row is the wrong one."""
    good = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [json.dumps({"messages": row}) + "\n" for row in [good] * 20 + [messages]]
    return {"talk.jsonl": "".join(rows)}


def edited(name: str, **changes: object) -> dict[str, Mapping[str, object]]:
    """Other values in a JSON file of the pretrained folder."""
    return {f"base/{name}": changes}


ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
# Files to write, values to set in files of the pretrained folder, arguments, what is said.
FINE_TUNING: dict[str, tuple[Files, Mapping[str, Mapping[str, object]], list[str], str]] = {
    "unknown role": (talk({"role": "asistant", "content": "a"}), {}, [], "'assistant'?"),
    "message without a role": (talk({"content": "a"}), {}, [], "talk.jsonl"),
    "message that is text": (talk("hello"), {}, [], '{"role": ..., "content": ...}'),
    "content that is a number": (talk({"role": "user", "content": 3}), {}, [], "content is"),
    "weight of a half": (talk(ASK, {**ANSWER, "weight": 0.5}), {}, [], "weight"),
    "messages that are text": ({"talk.jsonl": '{"messages": "a"}\n' * 9}, {}, [], "list of mess"),
    "two end tokens": (
        {},
        edited("generation_config.json", eos_token_id=5),
        [],
        "generation_config.json",
    ),
    "an end token beyond the tokenizer": (
        {},
        {
            **edited("config.json", eos_token_id=599),
            **edited("generation_config.json", eos_token_id=599),
        },
        [],
        "end",
    ),
    "no parameter to train": ({}, {}, ["train.trainable=nothing.*"], "train.trainable"),
    "a smaller vocabulary": ({}, edited("config.json", vocab_size=300), [], "vocab_size=300"),
    "experts of the source": ({}, {}, ["parallel.ep=3"], "num_experts=4"),
}


@pytest.mark.parametrize("name", FINE_TUNING)
def test_a_mistake_in_fine_tuning_is_one_line(
    job: Job,
    pretrained: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    files, changes, arguments, said = FINE_TUNING[name]
    toml = job()
    shutil.copytree(pretrained, tmp_path / "base")
    fill(tmp_path, Mistake([], "", files or talk(ASK, ANSWER)))
    for file, values in changes.items():
        found = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**found, **values}))
    source = [f"model.init_from={tmp_path}/base", "model.config_file=", "data.kind=chat"]
    common = [*source, f"data.corpus={tmp_path}/talk.jsonl", "tokenizer.vocab_size="]
    before = contents(tmp_path)
    assert main(["train", str(toml), *common, *arguments]) == 2
    assert said in only_line(capfd.readouterr().err)
    assert contents(tmp_path) == before


def test_a_source_without_a_tokenizer_is_a_question(
    job: Job, pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toml = job()
    shutil.copytree(pretrained, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    assert main(["train", str(toml), f"model.init_from={tmp_path}/base"]) == 2
    line = only_line(capfd.readouterr().err)
    assert "has no tokenizer to go on with" in line and "tokenizer.train=true" in line
    assert not (tmp_path / "run").exists()


RESUMING = {
    "rope": (["model.config_file=@/rope.json"], "rope_theta"),
    "experts for each token": (["model.config_file=@/top1.json"], "num_experts_per_tok"),
    "borders": (["data.reset_at_documents=false"], "--allow-change data.reset_at_documents"),
    "tokenizer": (["tokenizer.vocab_size=400"], "tokenizer"),
    "key that cannot be allowed": (["--allow-change=train.max_stepz"], "max_steps"),
    "corpus": (["data.corpus=@/corpus/abc.py"], "--allow-change data"),
    "seed": (["train.seed=9"], "--allow-change train.seed"),
    "length": (["data.sequence_length=16"], "--allow-change data.sequence_length"),
    "no step left": (["train.max_steps=2"], "raise train.max_steps"),
}
COMMANDS = {
    "generate: no folder": (["generate", "--checkpoint", "@/no", "--prompt", "a"], "@/no"),
    "generate: no tokenizer": (["generate", "--checkpoint", "@", "--prompt", "a"], "tokenizer"),
    "generate: no tokens wanted": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompt", "a", "--max-new-tokens=0"],
        "max_new_tokens=0",
    ),
    "generate: negative temperature": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompt", "a", "--temperature=-1"],
        "temperature=-1",
    ),
    "generate: negative top-k": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompt", "a", "--top-k=-1"],
        "top_k=-1",
    ),
    "generate: a prompt too long": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompt", "a b " * 300],
        "fewer than 256; shorten it",
    ),
    "generate: no file of prompts": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompts", "@/no.jsonl"],
        "no.jsonl",
    ),
    "generate: experts": (
        ["generate", "--checkpoint", "@/run/checkpoint-2", "--prompt", "a", "--ep=3"],
        "num_experts=8",
    ),
    "chat: no template": (["chat", "@/run/checkpoint-2", "--message", "a"], "template"),
    "eval: no checkpoint": (["eval", "@/no", "@/corpus"], "@/no"),
    "eval: no data": (["eval", "@/run/checkpoint-2", "@/no"], "@/no"),
    "data: no corpus": (["data", "@/job.toml", "data.corpus=@/no"], "'@/no' does not exist"),
    "data: no file": (["data", "@/no.toml"], "no.toml does not exist"),
    "inspect: no folder": (["inspect", "@/no"], "is not a folder"),
    "inspect: no checkpoint": (["inspect", "@/corpus"], "holds no complete checkpoint"),
    "plan: layers": (["plan", "@/job.toml", "parallel.pp=3"], "num_hidden_layers=4"),
    "plan: no file": (["plan", "@/no.toml"], "no.toml does not exist"),
    "train: a checkpoint for a file": (["train", "@/run/checkpoint-2"], "checkpoint-2"),
    "train: not TOML": (["train", "@/config.json"], "is not valid TOML"),
}


def test_mistakes_with_a_trained_run(
    job: Job,
    train: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One run is trained, then every command is used wrongly on it."""
    toml = job()
    train(load_config(toml, ["train.max_steps=2"]))
    run, damaged = tmp_path / "run", tmp_path / "damaged"
    shutil.copytree(run / "checkpoint-2", damaged)
    (damaged / "optimizer.safetensors").write_bytes(b"torn")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "rope.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    (tmp_path / "top1.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    resumed = ["train", "@/job.toml", "train.max_steps=9", "--resume"]
    resuming = {name: ([*resumed, *more], said) for name, (more, said) in RESUMING.items()}
    resuming["damaged"] = (["train", str(toml), "--resume", str(damaged)], "optimizer.safet")
    cases = []
    for name, (arguments, said) in {**resuming, **COMMANDS}.items():
        filled = [text.replace("@", str(tmp_path)) for text in (*arguments, said)]
        cases.append((name, filled[:-1], filled[-1]))
    before = contents(tmp_path)
    capfd.readouterr()
    for name, arguments, said in cases:
        assert main(arguments) == 2, name
        assert said in only_line(capfd.readouterr().err), name
        assert contents(tmp_path) == before, name


def test_there_are_as_many_mistakes_as_promised() -> None:
    assert sum(map(len, (EARLY, LATE, SIZES, FINE_TUNING, RESUMING, COMMANDS))) >= 90
