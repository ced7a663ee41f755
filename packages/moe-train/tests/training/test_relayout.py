"""A job that changes its layout while it runs, against one that saves and resumes, and one that
never changes."""

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_train.checkpoint import read_state
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.parallel import start
from moe_train.rank import RankContext
from moe_train.report import MetricsLog, ProgressLine
from moe_train.report.metrics import read_metrics
from moe_train.training import LayoutRequests, Reporter, TrainingLoop, build_training
from ranktest import run_ranks

Configure = Callable[..., Config]
LAYOUTS = ["pp=1 dp=1 ep=2", "pp=1 dp=2 ep=1", "pp=2 dp=1 ep=1", "pp=1 dp=2 ep=1 cp=2"]
CUT = ["pp=1 dp=2 ep=1 tp=2", "pp=1 dp=2 ep=1 etp=2"]  # which Muon refuses
MODEL = {"tie_word_embeddings": True}  # the first and the last stage hold the embedding
EACH = ["checkpoint.interval_steps=1", "checkpoint.save_total_limit=9"]


class StepHook(RankContext):
    """Calls a function when a step is finished."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self.hook = hook

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "step" and hasattr(self, "hook"):
            self.hook(int(value))  # type: ignore[call-overload]


def overrides(layout: str) -> list[str]:
    pairs = dict(pair.split("=") for pair in layout.split())
    parts = [f'"{pairs.pop("experts")}"'] if "experts" in pairs else []
    axes = [f"parallel.{axis}={size}" for axis, size in pairs.items()]
    return [*axes, f"parallel.expert_parts=[{', '.join(parts)}]"]


def end_of(
    config: Config,
    source: Path | None = None,
    hook: Callable[[int], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Run the loop on every rank; what each holds in the end, by kind and name.

    Args:
        source: a checkpoint to go on from.
        hook: called by rank 0 with each finished step.
    """
    prepare(config)
    Path(config.train.output_dir).mkdir(exist_ok=True)

    def on_rank(rank: int, _: int) -> dict[str, Tensor]:
        training = build_training(config, start(config))
        state = None if source is None else training.checkpointer.load(source)
        if state is None:
            torch.manual_seed(rank)  # what ranks keep to themselves must survive, too
        context = RankContext() if hook is None or rank else StepHook(hook)
        context.step = 0 if state is None else state.step
        reporter = None
        if rank == 0:
            log = MetricsLog(config.log_folder, tensorboard=False, resume_step=context.step)
            reporter = Reporter(log, ProgressLine(config.train.max_steps, "off"))
        loop = TrainingLoop.begin(config, training, reporter, state)
        del training
        if rank == 0:
            told = logging.FileHandler(Path(config.train.output_dir) / "said.log")
            logging.getLogger("moe_train").addHandler(told)
        loop.run(context)
        runner = loop.training.runner
        held = {f"weight {n}": t for n, t in loop.training.checkpointer.parameters.items()}
        held |= {f"master {n}": t for n, t in runner.optimizer.master.items()}
        for moment, tensors in runner.optimizer.moments().items():
            held |= {f"{moment} {name}": tensor for name, tensor in tensors.items()}
        loop.training.checkpointer.close()
        if reporter is not None:
            reporter.close()
        return {**held, "random state": torch.get_rng_state()}

    return run_ranks(on_rank, config.world_size, timeout_s=240)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "numbers",
    [
        [
            "train.dtype=bfloat16",
            "train.master_weights=true",
            "train.offload_optimizer=true",
            "parallel.sharding=3",
        ],
        ["optimizer.name=muon", "train.gradient_accumulation_steps=2", "parallel.sharding=2"],
    ],
)
def test_a_change_of_layout_has_the_bits_of_saving_and_resuming(
    configure: Configure, tmp_path: Path, numbers: list[str]
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    first = chance.randrange(7)  # of six experts; a rank may have none
    uneven = f"pp=1 dp=1 ep=2 cp={chance.randint(1, 2)} experts={first},{6 - first}"
    known = [*LAYOUTS, *CUT] if "optimizer.name=muon" not in numbers else LAYOUTS
    layouts = [*chance.sample(known, 2), uneven]
    chance.shuffle(layouts)
    steps = sorted(chance.sample(range(1, 5), 2))
    print(f"seed {seed}")
    check_changes(configure, tmp_path, layouts, steps, numbers)


def test_a_shared_out_embedding_that_is_the_head_moves_with_every_change_of_layout(
    configure: Configure, tmp_path: Path
) -> None:
    """Between one stage and two; its rows do not divide by the ranks."""
    layouts = [
        "pp=2 dp=2 ep=1 tp=2",
        "pp=1 dp=4 ep=1 tp=2",
        "pp=2 dp=1 ep=2 tp=2",
        "pp=1 dp=2 ep=2",
    ]
    numbers = ["parallel.sharding=1", "data.sequence_length=11"]
    check_changes(configure, tmp_path, layouts, [1, 2, 3], numbers, vocab_size=303)


def test_shares_of_experts_move_with_every_change_of_layout(
    configure: Configure, tmp_path: Path
) -> None:
    """Gate and up lie behind each other in one tensor, of which a rank has two runs of rows."""
    layouts = [
        "dp=2 ep=2 etp=2",
        "dp=4 tp=2 etp=4",
        "pp=2 dp=2 cp=2",
        "pp=2 dp=2 etp=2",
        "dp=4 etp=2",
    ]
    numbers = ["train.dtype=bfloat16", "train.master_weights=true", "parallel.sharding=3"]
    numbers += ["data.sequence_length=12", "train.global_batch_size=8"]
    check_changes(configure, tmp_path, layouts, [1, 2, 3, 4], numbers)


def check_changes(
    configure: Configure,
    folder: Path,
    layouts: list[str],
    steps: list[int],
    numbers: list[str],
    **model: object,
) -> None:
    """Change to each next layout after a step, in memory and by files: the same bits."""
    case = f"{layouts} from steps {steps}, {numbers}"
    same = [*numbers, "checkpoint.interval_minutes=inf"]
    changes = [f"{step}: {layout}" for step, layout in zip(steps, layouts[1:], strict=True)]
    relayout = "parallel.relayout=[" + ", ".join(f'"{change}"' for change in changes) + "]"
    in_memory = configure(
        *same, *overrides(layouts[0]), relayout, "train.max_steps=5", **MODEL, **model
    )
    found = end_of(in_memory)
    source = None
    for number, (layout, step) in enumerate(zip(layouts, [*steps, 5], strict=True)):
        files = folder / f"files-{number}"
        job = configure(
            *same,
            *EACH,
            *overrides(layout),
            f"train.output_dir={files}",
            "train.max_steps=5",
            **MODEL,
            **model,
        )
        expected = end_of(job, source)
        source = files / f"checkpoint-{step}"
    assert_same(found, expected, case)


def losses_of(config: Config) -> list[float]:
    lines = read_metrics(config.log_folder / "metrics.jsonl")
    return [float(str(line["loss"])) for line in lines if "loss" in line]


def assert_same(
    found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], case: str
) -> None:
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert here.keys() == there.keys(), case
        for name, tensor in here.items():
            assert torch.equal(tensor, there[name]), f"{case}, rank {rank}: {name}"


def test_a_running_job_changes_its_layout_when_it_is_asked_to(
    configure: Configure, tmp_path: Path
) -> None:
    same = ["train.max_steps=5", "parallel.ep=2"]
    folder = tmp_path / "asked"
    folder.mkdir()

    def ask(step: int) -> None:
        if step == 1:
            LayoutRequests(folder).ask((2, 1, 1, 1, 1, 1))  # heard of in step 2, done after it
        if step == 3:
            LayoutRequests(folder).ask((1, 1, 3, 1, 1, 1))  # which is no layout for two ranks

    found = end_of(configure(*same, f"train.output_dir={folder}"), hook=ask)
    said = (folder / "said.log").read_text()
    assert "the layout stays: parallel.relayout: '4: pp=1 dp=1 ep=3' needs 3 ranks" in said
    assert not (folder / "relayout.json").exists()
    scheduled = configure(*same, 'parallel.relayout=["2: pp=2"]')
    assert_same(found, end_of(scheduled), "asked, and by schedule")
    never = configure(*same, f"train.output_dir={tmp_path / 'never'}")
    end_of(never)
    assert losses_of(scheduled) == pytest.approx(losses_of(never), rel=1e-6)


def test_a_resumed_job_begins_in_the_layout_of_its_step(configure: Configure) -> None:
    relayout = 'parallel.relayout=["1: pp=2", "3: ep=2 experts=load"]'
    config = configure("parallel.ep=2", relayout, "train.max_steps=5", *EACH)
    whole = end_of(config)
    folder = Path(config.train.output_dir)
    states = [read_state(folder / f"checkpoint-{step}") for step in range(1, 6)]
    assert [bool(state.expert_parts) for state in states] == [False] * 3 + [True] * 2
    for step in (2, 4):  # before and after experts were moved by the rows that they had got
        assert_same(end_of(config, folder / f"checkpoint-{step}"), whole, f"from step {step} on")
        last = read_state(folder / "checkpoint-5")
        assert (last.expert_parts, last.expert_rows) == (
            states[4].expert_parts,
            states[4].expert_rows,
        )


def test_a_change_of_layout_keeps_decoder_and_corpus_whatever_becomes_of_their_files(
    configure: Configure, corpus: Path, tmp_path: Path
) -> None:
    """The second stage, which reads no tokens before, reads those that the job began with."""
    own = tmp_path / "own"
    shutil.copytree(corpus, own)
    same = [f"data.corpus={own}", "train.max_steps=4", *overrides("pp=1 dp=2 ep=1"), *EACH]
    change = 'parallel.relayout=["2: pp=2"]'
    expected = end_of(configure(*same, change, f"train.output_dir={tmp_path / 'as it was'}"))

    def spoil(step: int) -> None:
        if step == 1:
            (own / "later.py").write_text("for value in self: return None\n" * 200)
            (own / "f0.py").unlink()
            config = json.loads((tmp_path / "config.json").read_text())
            config["num_experts_per_tok"] = 1
            (tmp_path / "config.json").write_text(json.dumps(config))

    folder = tmp_path / "changed"
    found = end_of(configure(*same, change, f"train.output_dir={folder}"), hook=spoil)
    assert_same(found, expected, "files that change")
    states = [read_state(folder / f"checkpoint-{step}") for step in (1, 4)]
    assert states[0].data_fingerprint == states[1].data_fingerprint
    of_layouts = [(folder / f"checkpoint-{step}" / "config.json").read_bytes() for step in (1, 4)]
    assert of_layouts[0] == of_layouts[1]
