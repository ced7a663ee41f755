"""What is refused before a running job is asked for another layout."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.cache import claimed
from moe_train.config import Config, dump_toml
from moe_train.jobs import request_relayout
from moe_train.jobs.job import check_model
from moe_train.training import read_model_config

Configure = Callable[..., Config]


@pytest.fixture
def run(configure: Configure) -> Path:
    """The folder of a job of two ranks."""
    config = configure("parallel.ep=2")
    folder = Path(config.train.output_dir)
    folder.mkdir()
    (folder / "config.resolved.toml").write_text(dump_toml(config))
    return folder


def test_a_running_job_is_asked_and_others_are_not(run: Path) -> None:
    with pytest.raises(ValueError, match=r"no moe-train runs in .*parallel.pp=2 .*--resume"):
        request_relayout(run, (2, 1, 1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"parallel.ep=2 parallel.expert_parts='\[\"1,5\"\]' and"):
        request_relayout(run, (1, 1, 2, 1, 1, 1), "1,5")
    with pytest.raises(ValueError, match=r"has no config\.resolved\.toml"):
        request_relayout(run.parent, (2, 1, 1, 1, 1, 1))
    assert not (run / "relayout.json").exists()
    with claimed(run / "run.lock", "in use"):
        assert "asked" in request_relayout(run, (2, 1, 1, 1, 1, 1))
    assert (run / "relayout.json").exists()


def test_a_layout_that_does_not_fit_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="'1: pp=4 dp=1 ep=1' needs 4 ranks, but the job has 2"):
        request_relayout(run, (4, 1, 1, 1, 1, 1))


def test_every_layout_of_a_schedule_is_checked_before_the_job_begins(configure: Configure) -> None:
    config = configure("parallel.dp=2", 'parallel.relayout=["2: ep=2", "5: pp=2"]')
    check_model(config, read_model_config(config))
    config = configure(
        "parallel.dp=4", "train.global_batch_size=16", 'parallel.relayout=["2: ep=4"]'
    )
    with pytest.raises(ValueError, match=r"parallel\.relayout after step 2: parallel\.ep=4 ranks"):
        check_model(config, read_model_config(config))


def test_experts_that_do_not_fit_are_refused(configure: Configure, run: Path) -> None:
    for experts, message in (
        ("1,2", "'1,2' are 3 experts, but num_experts=6"),
        ("6", "has parts for 1 ranks, but ep=2"),
        ("many", "is no change of layout"),
    ):
        with pytest.raises(ValueError, match=message):
            request_relayout(run, (1, 1, 2, 1, 1, 1), experts)
    with claimed(run / "run.lock", "in use"):
        for experts in ("1,5", "load"):
            assert f"experts={experts}" in request_relayout(run, (1, 1, 2, 1, 1, 1), experts)
    config = configure("parallel.dp=2", 'parallel.relayout=["2: ep=2 experts=load"]')
    check_model(config, read_model_config(config))
    config = configure("parallel.ep=2", 'parallel.expert_parts=["9: 1,5"]')
    with pytest.raises(ValueError, match="names layer 9, which has no experts; those that have"):
        check_model(config, read_model_config(config))
