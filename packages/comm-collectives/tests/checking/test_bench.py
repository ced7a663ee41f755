"""The sub-command bench: what it measures, prints and refuses."""

import json

import pytest

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.checking.bench import (
    QUICK_SIZES,
    BenchCase,
    BenchReport,
    BenchResult,
    bench_machine,
    format_bench,
    to_json,
)
from comm_collectives.cli import main
from comm_collectives.errors import CommError


def _result(collective, num_bytes, gloo_s, shm_s):
    case = BenchCase(collective=collective, num_bytes=num_bytes, rounds=len(gloo_s))
    return BenchResult(case=case, gloo_s=gloo_s, shm_s=shm_s, copy_s=[1.0] * len(gloo_s))


def test_quick_run_measures_every_collective_and_size(capsys):
    assert main(["bench", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_ranks"] == 2
    assert report["shares_memory"] is backends_may_be_python()
    cells = {(cell["collective"], cell["num_bytes"]) for cell in report["cells"]}
    assert {num_bytes for _, num_bytes in cells} == set(QUICK_SIZES)
    assert len(cells) == len(report["cells"]) == 5 * len(QUICK_SIZES)
    for cell in report["cells"]:
        assert len(cell["gloo_s"]) == len(cell["shm_s"]) == len(cell["copy_s"]) == cell["rounds"]
        assert min(cell["gloo_s"] + cell["shm_s"]) > 0
        assert cell["speedup"]["low"] <= cell["speedup"]["median"] <= cell["speedup"]["high"]


def test_table_shows_the_median_of_the_rounds_ratios():
    results = (
        _result("all_reduce", 4096, [2.0, 9.0, 4.0], [1.0, 3.0, 4.0]),
        _result("all_reduce", 1 << 20, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
    )
    report = BenchReport(num_ranks=2, shares_memory=True, results=results)
    lines = format_bench(report).splitlines()
    assert lines[-2].split() == ["collective", "4", "KiB", "1", "MiB"]
    assert lines[-1].split() == ["all_reduce", "2.00x", "0.50x"]
    cells = json.loads(to_json(report))["cells"]
    assert [cell["speedup"]["median"] for cell in cells] == [2.0, 0.5]


def test_table_says_when_there_was_no_shared_memory():
    results = (_result("broadcast", 4096, [1.0, 1.0], [1.0, 1.0]),)
    report = BenchReport(num_ranks=2, shares_memory=False, results=results)
    assert "share no memory: comm_shm is gloo here" in format_bench(report)


def test_run_that_takes_too_long_names_rank_and_collective():
    with pytest.raises(CommError, match=r"rank 0 in all_reduce: no answer within"):
        bench_machine(2, timeout_s=0.001, quick=True)


@pytest.mark.parametrize("args", [["--world-size", "1"], ["--timeout-s", "0"]])
def test_misuse_ends_with_status_two(args, capsys):
    assert main(["bench", *args]) == 2
    assert "--world-size must be at least 2" in capsys.readouterr().err
