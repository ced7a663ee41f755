from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from moe_train.config import Config
from moe_train.data import Batch
from moe_train.parallel import start
from moe_train.training.build import build_runner, read_model_config
from moe_train.training.timeline import TIMELINE_FILE, Timeline
from ranktest import run_ranks


def test_a_step_is_drawn_with_the_time_that_its_ranks_wait(
    configure: Callable[..., Config], random_batches: Callable[..., list[Batch]]
) -> None:
    """Two pipelines of two ranks, of which the first is drawn."""
    layout = ("parallel.pp=2", "parallel.dp=2", "parallel.schedule=zbv")
    config = configure(*layout, num_hidden_layers=4)

    def run(*_: int) -> dict[str, float]:
        parallel = start(config)
        runner = build_runner(config, read_model_config(config), parallel, {})[0]
        batches = random_batches(config, 0, parallel.data_rank, 2)
        picture = Timeline(parallel)
        runner.train(batches, lr=1e-3, times=picture.times)
        path = config.log_folder / f"{parallel.rank}-{TIMELINE_FILE}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return picture.finish(runner.executor.schedule, path)

    found = run_ranks(run, 4)
    assert found[0] == found[2] and found[1] == found[3]
    for figures in found:
        assert 0 < figures["pipeline_bubble"] < 1 and 0 < figures["simulated_bubble"] < 1
    (drawn,) = config.log_folder.glob(f"*{TIMELINE_FILE}")
    assert drawn.name == f"0-{TIMELINE_FILE}"
    texts = [e.text or "" for e in ElementTree.parse(drawn).iter() if e.tag.endswith("text")]
    assert f"idle {100 * found[0]['pipeline_bubble']:.1f} %" in texts[0]
    assert f"{100 * found[0]['simulated_bubble']:.1f} % simulated" in texts[0]
    assert texts.count("rank 0") == texts.count("rank 1") == 1
    titles = [e for e in ElementTree.parse(drawn).iter() if e.tag.endswith("title")]
    microbatches = config.train.gradient_accumulation_steps
    assert len(titles) == 2 * 2 * 3 * microbatches


def test_a_picture_that_cannot_be_written_does_not_end_the_run(
    configure: Callable[..., Config], random_batches: Callable[..., list[Batch]], tmp_path: Path
) -> None:
    config = configure("parallel.pp=2")

    def run(*_: int) -> dict[str, float]:
        parallel = start(config)
        runner = build_runner(config, read_model_config(config), parallel, {})[0]
        picture = Timeline(parallel)
        runner.train(random_batches(config, 0, 0, 1), lr=1e-3, times=picture.times)
        return picture.finish(runner.executor.schedule, tmp_path)  # a folder

    assert all(0 < figures["pipeline_bubble"] < 1 for figures in run_ranks(run, 2))
