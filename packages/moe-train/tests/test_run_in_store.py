"""The checkpoints of a run in a store: the command, a stop and a resume elsewhere."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_train.checkpoint import find_checkpoint, newest_checkpoint
from moe_train.config import Config, dump_toml
from moe_train.jobs.job import check, has_begun, train
from moe_train.rank import RankContext
from moe_train.report.metrics import read_metrics
from ranktest import run_ranks
from ranktest.s3 import start_s3
from unified_ckpt import diff_checkpoints, get_last_checkpoint
from unified_ckpt.files.storage import as_target

Configure = Callable[..., Config]

COMMAND = "import sys; from moe_train.cli import main; sys.exit(main(sys.argv[1:]))"


def on_ranks(config: Config, resume: str) -> list[object]:
    """Check and train as ranks that another program has started; return where each had stood."""

    def run(rank: int, _: int) -> str:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        source = check(config, resume)
        train(config, str(source or ""), RankContext())
        return str(source)

    return run_ranks(run, config.world_size, timeout_s=300)


def differences(a: str, b: Path) -> list[object]:
    """Compare two checkpoints, in a process of its own: clients of stores do not survive forks."""
    return run_ranks(lambda *_: [str(each) for each in diff_checkpoints(a, b)], 1)


def test_a_run_on_s3_goes_on_elsewhere_as_one_on_a_disk(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; the folder for logs of the resumed run is new, as on a fresh node."""
    with start_s3() as server:
        url = f"{server.make_bucket('runs')}/a"
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        there = ["parallel.ep=2", f"train.output_dir={url}"]
        on_ranks(configure(*there, f"log.dir={tmp_path / 'logs'}", "train.max_steps=2"), "")
        assert on_ranks(configure(*there, f"log.dir={tmp_path / 'other'}"), "latest") == (
            [f"{url}/checkpoint-2"] * 2
        )
        on_ranks(configure("parallel.ep=2", "train.max_steps=2"), "")
        on_ranks(configure("parallel.ep=2"), "latest")
        ((*found,),) = differences(f"{url}/checkpoint-4", tmp_path / "run" / "checkpoint-4")
        others = [each for each in found if "random_state" not in each]  # Python's has no seed
        assert others == ["file 'moe_train.toml': contents differ"]
    lines = read_metrics(tmp_path / "other" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 4, 4]
    assert not [path for path in tmp_path.rglob("checkpoint-*") if "run" not in path.parts]


def test_the_command_says_what_goes_where_and_takes_urls(
    configure: Configure, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/runs/a"
    job = tmp_path / "store.toml"
    overrides = [f"train.output_dir={url}", f"log.dir={tmp_path}/logs", "train.max_steps=1"]
    job.write_text(dump_toml(configure(*overrides)))
    command = [sys.executable, "-c", COMMAND, "train", str(job), "--resume=auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    assert f"checkpoints go to {url}; metrics, plots, run.json and the run's lock to log.dir=" in (
        done.stderr
    )
    assert f"  {url}/checkpoint-1" in done.stdout
    assert json.loads((tmp_path / "logs" / "run.json").read_text())["starts"][0]["ended_at"]


def test_a_store_is_looked_at_as_a_folder_is(configure: Configure, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/a"
    config = configure("train.max_steps=1", f"train.output_dir={url}", f"log.dir={tmp_path}/logs")
    assert not has_begun(config) and find_checkpoint(as_target("x", url), "") is None
    with pytest.raises(ValueError, match=f"{url} holds no complete checkpoint"):
        check(config, "latest")
    with pytest.raises(ValueError, match="checkpoint-9: no such folder; name a checkpoint-N"):
        check(config, f"{url}/checkpoint-9")
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), 1)
    assert has_begun(config)
    with pytest.raises(ValueError, match="already holds checkpoints; pass --resume"):
        check(config, "")
    for named in ("latest", url, f"{url}/checkpoint-1"):
        with pytest.raises(ValueError, match=r"checkpoint-1 is at step 1 and train.max_steps=1"):
            check(config, named)
    last = get_last_checkpoint(url)
    place = as_target("x", f"{url}/checkpoint-2/notes.txt")
    place.store.upload(place.key, [b"mine"], num_bytes=4)
    more = configure("train.max_steps=3", f"train.output_dir={url}", f"log.dir={tmp_path}/logs")
    with pytest.raises(ValueError, match=r"checkpoint-2 is no complete .*move it away"):
        check(more, "latest")
    assert str(newest_checkpoint(as_target("x", url))) == str(last) == f"{url}/checkpoint-1"
