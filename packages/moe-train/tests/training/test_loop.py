"""The loop over real ranks: what it does, in which order, and where it stops and goes on."""

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from moe_train.checkpoint import TrainerState, newest_checkpoint, read_state
from moe_train.config import Config
from moe_train.data import prepare
from moe_train.optim import LrSchedule
from moe_train.parallel import start
from moe_train.rank import watch_stop_signals
from moe_train.report import MetricsLog, ProgressLine
from moe_train.report.metrics import read_metrics
from moe_train.training.build import build_training
from moe_train.training.loop import Position, Reporter, TrainingLoop
from moe_train.training.sources import open_splits
from moe_train.training.step import StepResult, step_metrics
from ranktest import run_ranks

Configure = Callable[..., Config]


class WatchedLog(MetricsLog):
    """Writes as usual, and notes which checkpoints are there at that moment."""

    def __init__(self, config: Config, then: Callable[[int], None] | None, step: int) -> None:
        self.folder = Path(config.train.output_dir)
        super().__init__(self.folder, tensorboard=False, resume_step=step)
        self.events: list[tuple[int, str, list[int]]] = []
        self.then = then

    def write(self, step: int, values: object) -> None:
        kind = "validation" if "validation_loss" in values else "step"  # type: ignore[operator]
        saved = sorted(int(path.name.split("-")[1]) for path in self.folder.glob("checkpoint-*"))
        self.events.append((step, kind, saved))
        super().write(step, values)  # type: ignore[arg-type]
        if self.then is not None:
            self.then(step)


class Ran:
    """What one rank's loop left."""

    def __init__(
        self, saved: Path | None, position: Position, events: list[tuple[int, str, list[int]]]
    ) -> None:
        self.saved, self.position, self.events = saved, position, events


def run_loop(
    config: Config,
    *,
    asks: Callable[[int], Callable[[int], None] | None] = lambda _: None,
    resume: bool = False,
) -> list[Ran]:
    """Run the loop on every rank.

    Args:
        asks: called with the rank before the loop, which watches its signals by then; returns
            what to call after each line of the metrics, if anything.
        resume: go on from the newest checkpoint.
    """
    prepare(config)

    def on_rank(rank: int, _: int) -> Ran:
        training = build_training(config, start(config))
        state = None
        if resume:
            source = newest_checkpoint(Path(config.train.output_dir))
            assert source is not None
            state = training.checkpointer.load(source)
        context = watch_stop_signals()
        context.step = 0 if state is None else state.step
        then = asks(rank)
        reporter = None
        if rank == 0:
            log = WatchedLog(config, then, context.step)
            reporter = Reporter(log, ProgressLine(config.train.max_steps, "off"))
        loop = TrainingLoop.begin(config, training, reporter, state)
        saved, position = loop.run(context), loop.position
        if reporter is not None:
            reporter.close()
        assert context.step == position.step
        return Ran(saved, position, [] if reporter is None else log.events)

    return run_ranks(on_rank, config.world_size, timeout_s=120)  # type: ignore[return-value]


def metrics(config: Config) -> list[dict[str, object]]:
    return list(read_metrics(Path(config.train.output_dir) / "metrics.jsonl"))


def losses(config: Config) -> dict[object, object]:
    return {line["step"]: line["loss"] for line in metrics(config) if "loss" in line}


def test_each_step_is_reported_then_validated_then_saved(configure: Configure) -> None:
    config = configure(
        "train.max_steps=5",
        "train.validation_interval_steps=2",
        "checkpoint.interval_steps=2",
        "checkpoint.save_total_limit=9",
    )
    (ran,) = run_loop(config)
    assert ran.events == [
        (1, "step", []),
        (2, "step", []),
        (2, "validation", []),
        (3, "step", [2]),
        (4, "step", [2]),
        (4, "validation", [2]),
        (5, "step", [2, 4]),
        (5, "validation", [2, 4]),
    ]
    folder = Path(config.train.output_dir)
    assert ran.saved == folder / "checkpoint-5"
    assert {path.name for path in folder.glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in (2, 4, 5)
    }
    assert (ran.position.step, ran.position.consumed_samples) == (5, 60)


def test_without_intervals_the_end_alone_is_validated_and_saved(configure: Configure) -> None:
    config = configure("train.max_steps=3", "log.interval_steps=2")
    (ran,) = run_loop(config)
    assert ran.events == [(2, "step", []), (3, "step", []), (3, "validation", [])]
    assert [path.name for path in Path(config.train.output_dir).glob("checkpoint-*")] == [
        "checkpoint-3"
    ]


def test_old_checkpoints_leave_when_new_ones_are_complete(configure: Configure) -> None:
    config = configure("checkpoint.interval_steps=1", "checkpoint.save_total_limit=2")
    (ran,) = run_loop(config)
    assert [saved for _, kind, saved in ran.events if kind == "step"] == [[], [1], [1, 2], [2, 3]]
    assert {path.name for path in Path(config.train.output_dir).glob("checkpoint-*")} == {
        "checkpoint-3",
        "checkpoint-4",
    }


def test_the_checkpoint_with_the_lowest_validation_loss_is_saved_and_stays(
    configure: Configure, tmp_path: Path
) -> None:
    """The rate is far too high, so that the loss falls and then rises."""
    changes = ["optimizer.lr=0.15", "optimizer.decay=constant", "optimizer.max_grad_norm=inf"]
    changes += ["train.validation_interval_steps=1", "checkpoint.save_total_limit=1"]
    config = configure("train.max_steps=5", "checkpoint.keep_best=true", "parallel.dp=2", *changes)
    run_loop(config)

    def best() -> int:
        found = {
            line["step"]: line["validation_loss"]
            for line in metrics(config)
            if "validation_loss" in line
        }
        return min(found, key=lambda step: found[step])  # type: ignore[return-value]

    def saved() -> set[str]:
        return {path.name for path in (tmp_path / "run").glob("checkpoint-*")}

    assert 1 <= best() < 5 and saved() == {f"checkpoint-{best()}", "checkpoint-5"}
    kept = json.loads((tmp_path / "run" / f"checkpoint-{best()}" / "metrics.json").read_bytes())
    assert kept["step"] == best() and kept["metrics"].keys() == {"validation_loss"}
    first = best()
    changes[0] = "optimizer.lr=1.0"
    config = configure("train.max_steps=7", "checkpoint.keep_best=true", "parallel.dp=2", *changes)
    run_loop(config, resume=True)
    assert best() == first and saved() == {f"checkpoint-{first}", "checkpoint-7"}


def test_a_job_that_may_not_last_ends_with_a_checkpoint_and_goes_on(configure: Configure) -> None:
    ends = run_loop(configure("train.exit_duration_minutes=1e-6", "parallel.pp=2"))
    assert [ran.position.step for ran in ends] == [1, 1]
    assert ends[0].saved is not None and ends[0].saved.name == "checkpoint-1"
    on = run_loop(configure("train.exit_duration_minutes=60", "parallel.pp=2"), resume=True)
    assert [ran.position.step for ran in on] == [4, 4]


def test_a_checkpoint_says_where_the_run_stands(configure: Configure) -> None:
    config = configure("train.max_steps=2", "train.seed=5")
    (ran,) = run_loop(config)
    assert ran.saved is not None

    def loads_of(layer: int) -> tuple[int, ...]:
        name = f"expert_load/{layer}"
        each = [line[name] for line in metrics(config) if name in line]
        return tuple(map(sum, zip(*each, strict=True)))  # type: ignore[call-overload]

    assert read_state(ran.saved) == TrainerState(
        step=2,
        consumed_samples=24,
        data_fingerprint=prepare(config).fingerprint,
        sequence_length=12,
        seed=5,
        schedule=LrSchedule.of(config.optimizer, 2),
        best_validation_loss=metrics(config)[-1]["validation_loss"],  # type: ignore[arg-type]
        expert_rows=tuple(map(loads_of, range(2))),
    )


@pytest.mark.parametrize("asked", [0, 1])
def test_any_ranks_request_ends_the_run_after_the_step_with_a_checkpoint_and_no_validation(
    configure: Configure, asked: int
) -> None:
    config = configure("parallel.dp=2", "train.validation_interval_steps=1")

    def asks(rank: int) -> None:
        if rank == asked:
            signal.raise_signal(signal.SIGTERM)

    ranks = run_loop(config, asks=asks)
    folder = Path(config.train.output_dir)
    assert [ran.saved for ran in ranks] == [folder / "checkpoint-1"] * 2
    assert [ran.position for ran in ranks] == [Position(1, 12)] * 2
    assert ranks[0].events == [(1, "step", [])]
    assert read_state(folder / "checkpoint-1").step == 1


def test_a_request_between_steps_is_answered_after_the_next_one(configure: Configure) -> None:
    config = configure("train.max_steps=9", "train.validation_interval_steps=3")

    def asks(_: int) -> Callable[[int], None]:
        return lambda step: signal.raise_signal(signal.SIGINT) if step == 2 else None

    (ran,) = run_loop(config, asks=asks)
    assert [event[:2] for event in ran.events] == [(1, "step"), (2, "step"), (3, "step")]
    assert ran.saved == Path(config.train.output_dir) / "checkpoint-3"


def test_a_run_that_stopped_goes_on_with_the_next_sample_as_if_it_had_not(
    configure: Configure, tmp_path: Path
) -> None:
    whole = configure("parallel.pp=2", f"train.output_dir={tmp_path / 'whole'}")
    run_loop(whole)
    parts = configure("parallel.pp=2", f"train.output_dir={tmp_path / 'parts'}")

    def asks(_: int) -> Callable[[int], None]:
        return lambda step: signal.raise_signal(signal.SIGTERM) if step == 1 else None

    stopped = run_loop(parts, asks=asks)
    assert [ran.position for ran in stopped] == [Position(2, 24)] * 2
    resumed = run_loop(parts, resume=True)
    assert [event[:2] for event in resumed[0].events] == [
        (3, "step"),
        (4, "step"),
        (4, "validation"),
    ]
    assert [ran.position for ran in resumed] == [Position(4, 48)] * 2
    assert losses(parts) == losses(whole)
    compared = [
        (line["lr"], line["consumed_samples"], line["grad_norm"])
        for line in metrics(whole)
        if "loss" in line
    ]
    again = [
        (line["lr"], line["consumed_samples"], line["grad_norm"])
        for line in metrics(parts)
        if "loss" in line
    ]
    assert again == compared
    assert metrics(parts)[-1] == metrics(whole)[-1], "the validation at the end"


@pytest.mark.parametrize("layout", [(), ("parallel.pp=2", "parallel.ep=2")])
def test_reading_ahead_changes_no_loss(
    configure: Configure, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    runs = []
    for depth in (0, 3):
        output = f"train.output_dir={tmp_path / str(depth)}"
        config = configure(*layout, output, f"data.prefetch_batches={depth}")
        run_loop(config)
        runs.append(losses(config))
        assert all(0 <= line["data_wait_fraction"] <= 1 for line in metrics(config) if "lr" in line)  # type: ignore[operator]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("how", ["constant", "restretch", "rewarm"])
def test_a_longer_run_has_the_learning_rates_that_it_was_asked_for(
    configure: Configure, how: str
) -> None:
    base = ("optimizer.warmup_steps=1", "optimizer.decay=linear", "optimizer.min_lr_ratio=0.5")
    first = configure(*base, "train.max_steps=3")
    run_loop(first)
    longer = configure(*base, "train.max_steps=6", f"optimizer.on_extend={how}")
    (ran,) = run_loop(longer, resume=True)
    rates = {line["step"]: line["lr"] for line in metrics(longer) if "loss" in line}
    assert [rates[step] for step in (1, 2, 3)] == [0.01, 0.0075, 0.005]
    on = {
        "constant": [0.005, 0.005, 0.005],
        "restretch": [0.007, 0.006, 0.005],  # 0.01 - 0.001 for each step behind the first
        "rewarm": [0.01, 0.0075, 0.005],
    }[how]
    assert [rates[step] for step in (4, 5, 6)] == pytest.approx(on, rel=1e-12)
    assert ran.saved is not None
    kept = read_state(ran.saved).schedule
    assert kept is not None and [kept.rate(s) for s in (4, 5, 6)] == [rates[s] for s in (4, 5, 6)]
    shutil.rmtree(Path(longer.train.output_dir) / "checkpoint-6")
    again = configure(*base, "train.max_steps=6", f"optimizer.on_extend={how}")
    run_loop(again, resume=True)
    assert {line["step"]: line["lr"] for line in metrics(again) if "loss" in line} == rates


def test_a_run_at_its_last_step_does_nothing(configure: Configure) -> None:
    config = configure("train.max_steps=1")
    run_loop(config)
    (ran,) = run_loop(config, resume=True)
    assert (ran.saved, ran.events, ran.position) == (None, [], Position(1, 12))


def test_figures_of_a_step_have_its_rate_and_speed(configure: Configure) -> None:
    config = configure("optimizer.warmup_steps=2")
    run_loop(config)
    steps = [line for line in metrics(config) if "loss" in line]
    rates = [LrSchedule.of(config.optimizer, 4).rate(step) for step in (1, 2, 3, 4)]
    assert rates[0] == 0.005 and rates[1] == 0.01 > rates[2] > rates[3]
    assert [line["lr"] for line in steps] == rates
    for line in steps:
        assert 0 <= line["data_time_s"] <= line["step_time_s"]  # type: ignore[operator]
        assert line["tokens_per_s"] == pytest.approx(12 * 12 / line["step_time_s"])  # type: ignore[operator]


@pytest.mark.parametrize("is_asked", [False, True])
def test_each_step_has_the_bytes_that_were_sent_where_that_is_asked(
    configure: Configure, is_asked: bool
) -> None:
    config = configure("parallel.ep=2", f"log.sent_bytes={str(is_asked).lower()}")
    run_loop(config)
    steps = [line for line in metrics(config) if "loss" in line]
    assert len(steps) == 4
    for line in steps:
        assert ("sent_bytes/dispatch" in line) == is_asked
        assert line.get("sent_bytes/dispatch", 1) > 0  # type: ignore[operator]


@pytest.mark.parametrize("layout", [(), ("parallel.dp=2",), ("parallel.pp=2", "parallel.ep=2")])
def test_the_validation_loss_is_the_plain_mean_over_the_first_sequences(
    configure: Configure, layout: tuple[str, ...]
) -> None:
    """Of 17 sequences, which fill one batch of 12 and a part of the next."""
    base = ("train.max_steps=1", "train.validation_sequences=17", "optimizer.lr=1e-30")
    config = configure(*base, *layout)
    run_loop(config)
    said = next(line for line in metrics(config) if "validation_loss" in line)

    def plain(*_: int) -> float:
        one = configure(*base)
        stage = build_training(one, start(one)).runner.stages.by_number[0].eval()
        _, split = open_splits(one, prepare(one))
        assert split.num_sequences > 17
        batch = split.batch(range(17))
        with torch.no_grad():
            hidden, _ = stage.hidden_states(batch.input_ids, batch.position_ids)
            logits = stage.logits(hidden).flatten(0, 1).double()
            return F.cross_entropy(logits, batch.labels.flatten()).item()

    expected = run_ranks(plain, 1)[0]
    assert said["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert said["validation_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)  # type: ignore[arg-type]


def test_a_stage_that_reads_no_tokens_runs_the_same_steps(
    configure: Configure, tmp_path: Path
) -> None:
    one = configure(f"train.output_dir={tmp_path / 'one'}", num_hidden_layers=3)
    three = configure(
        "parallel.pp=3", f"train.output_dir={tmp_path / 'three'}", num_hidden_layers=3
    )
    run_loop(one)
    ranks = run_loop(three)
    assert [ran.position for ran in ranks] == [Position(4, 48)] * 3
    expected = losses(one)
    assert losses(three) == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}
    last, other = metrics(one)[-1], metrics(three)[-1]
    assert last["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-5)


def result(**changes: object) -> StepResult:
    values: dict[str, object] = {
        "loss": 2.5,
        "aux_loss": 0.25,
        "z_loss": 0.0,
        "mtp_loss": 0.0,
        "grad_norm": 1.5,
        "num_tokens": 8,
        "load_LE": [[4, 0, 2, 2], [0, 0, 0, 0], [2, 2, 2, 2]],
        "stop_requested": False,
    }
    return StepResult(**{**values, **changes})  # type: ignore[arg-type]


def test_figures_name_the_layers_with_experts_and_the_busiest_expert() -> None:
    assert step_metrics(result()) == {
        "loss": 2.5,
        "aux_loss": 0.25,
        "grad_norm": 1.5,
        "expert_load/0": [4, 0, 2, 2],
        "expert_load/2": [2, 2, 2, 2],
        "expert_load_max_over_mean": 2.0,
    }
    assert step_metrics(result(load_LE=[[0, 0]]))["expert_load_max_over_mean"] == 0


def test_the_loss_of_no_token_is_no_number() -> None:
    assert math.isnan(step_metrics(result(loss=0.0, num_tokens=0))["loss"])  # type: ignore[arg-type]


def test_what_predicts_no_token_is_no_figure_and_not_the_best(
    configure: Configure, trained_run: Path, tmp_path: Path
) -> None:
    """One row has targets in each part; neither the first step nor the validation reads it."""
    ids = np.arange(40 * 8, dtype=np.int64).reshape(40, 8) % 200 + 50
    ids[:, 0] = np.arange(40) + 1
    path = tmp_path / "rows.safetensors"
    config = configure(
        f'data.corpus=["{path}"]',
        "data.kind=tokens",
        "data.packing=pad",
        f"tokenizer.file={trained_run / 'checkpoint-2'}",
        "train.max_steps=8",
        "train.global_batch_size=2",
        "train.validation_interval_steps=2",
        "train.validation_sequences=1",
        "checkpoint.keep_best=true",
    )
    save_file({"input_ids": ids, "loss_mask": np.ones_like(ids)}, path)
    _, held = open_splits(config, prepare(config))
    last = held.num_sequences - 1
    trained = [1, int(held.batch([last]).input_ids[0, 0])]
    mask = np.isin(ids[:, :1], trained) * np.ones_like(ids)
    save_file({"input_ids": ids, "loss_mask": mask}, path)
    (ran,) = run_loop(config)
    lines = metrics(config)
    found = [line["loss"] for line in lines if "loss" in line]
    assert len(found) == 8
    assert None in found
    assert 0.0 not in found
    said = [(v["validation_loss"], v["validation_perplexity"]) for v in lines if "loss" not in v]
    assert said == [(None, None)] * 4
    assert ran.saved is not None
    assert read_state(ran.saved).best_validation_loss is None


def test_losses_that_most_jobs_lack_are_named_where_they_are() -> None:
    figures = step_metrics(result(z_loss=0.5, mtp_loss=3.0))
    assert (figures["z_loss"], figures["mtp_loss"]) == (0.5, 3.0)
