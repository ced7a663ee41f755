import subprocess
import sys

import pytest

from moe_pipeline.cli import main
from moe_pipeline.schedules.generators.basic import one_f_one_b
from moe_pipeline.schedules.generators.dual_pipe import dualpipe
from moe_pipeline.schedules.views.csv_file import to_csv
from ranktest import unread_output


def test_schedule_prints_the_picture(capsys):
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 1 |  . F0 B0  - F1 B1  - F2 B2" in out


def test_schedule_as_csv_passes_check(capsys, tmp_path):
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--csv"]) == 0
    path = tmp_path / "plan.csv"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["check", str(path)]) == 0
    assert "4 stages, 8 microbatches, 0 problems" in capsys.readouterr().out


def test_check_proves_the_order_of_pairs(capsys, tmp_path):
    path = tmp_path / "late.csv"
    row = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    row += "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    path.write_text(row, encoding="utf-8")
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--send-buffers", "0"]) == 1
    assert main(["check", str(path), "--communicators", "2"]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "--communicators", "1"]) == 1
    assert "0RECV_B0 waits for ever" in capsys.readouterr().out


def test_check_names_the_problem(capsys, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(to_csv(one_f_one_b(2, 2)).replace(",1B1", ""), encoding="utf-8")
    assert main(["check", str(path)]) == 1
    assert "1B1 occurs 0 times, expected 1" in capsys.readouterr().out


def test_check_adds_transfers_to_computations(capsys, tmp_path):
    path = tmp_path / "compute.csv"
    path.write_text("0F0,,,0B0\n,1F0,1B0\n", encoding="utf-8")
    assert main(["check", str(path)]) == 0
    assert "added where stages lie on different ranks" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"hello\n", b"", b"\xff\xfe"])
def test_a_file_that_is_no_schedule_is_refused(capsys, tmp_path, content):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith("moe-pipeline: ")


def test_schedules_and_simulations_are_drawn(capsys, tmp_path):
    picture, timeline = tmp_path / "a.svg", tmp_path / "b.svg"
    sizes = ["--stages", "4", "--microbatches", "8"]
    assert main(["schedule", "zbv", *sizes, "--svg", str(picture)]) == 0
    assert "zbv: 8 stages on 4 ranks, 8 microbatches, 51 slots" in capsys.readouterr().out
    assert picture.read_text(encoding="utf-8").count("<title>") == 4 * 8 * 6
    assert main(["simulate", "1f1b", *sizes, "--forward", "2", "--svg", str(timeline)]) == 0
    assert "makespan 44, idle 27.3 %" in capsys.readouterr().out
    assert timeline.read_text(encoding="utf-8").count("<title>") == 4 * 8 * 2


def test_simulate_reads_files_and_wants_sizes_for_names(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text(to_csv(one_f_one_b(2, 3)), encoding="utf-8")
    assert main(["simulate", str(path)]) == 0
    assert "plan: 2 stages on 2 ranks, 3 microbatches\nmakespan 12" in capsys.readouterr().out
    assert main(["simulate", "1f1b"]) == 2
    assert "1f1b needs --stages and --microbatches" in capsys.readouterr().err
    assert main(["simulate", str(path), "--microbatches", "8"]) == 2
    assert "is read as a file, which has its own" in capsys.readouterr().err


def test_simulate_says_what_is_wrong_with_a_file(capsys, tmp_path):
    path = tmp_path / "half.csv"
    path.write_text("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    assert main(["simulate", str(path)]) == 1
    printed = capsys.readouterr()
    assert "0B1" in printed.err and not printed.out
    path.write_text(to_csv(dualpipe(4, 4)), encoding="utf-8")
    assert main(["simulate", str(path)]) == 1
    assert main(["simulate", str(path), "--copies", "2"]) == 0


def test_a_plan_passes_check_and_keeps_its_cap(capsys, tmp_path):
    sizes = ["--stages", "3", "--microbatches", "4", "--memory-cap", "5"]
    assert main(["plan", *sizes, "--csv", "--svg", str(tmp_path / "a.svg")]) == 0
    path = tmp_path / "plan.csv"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["check", str(path)]) == 0
    assert main(["simulate", str(path)]) == 0
    assert "peak 5 bytes" in capsys.readouterr().out
    assert main(["plan", *sizes[:-1], "1"]) == 2
    assert "memory_cap_bytes=1 is less than the 2 bytes" in capsys.readouterr().err


def test_check_knows_copies(capsys, tmp_path):
    path = tmp_path / "dual.csv"
    path.write_text(to_csv(dualpipe(4, 4)), encoding="utf-8")
    assert main(["check", str(path)]) == 1
    assert "stage 0 is on rank 0 already" in capsys.readouterr().out
    assert main(["check", str(path), "--copies", "2"]) == 0


def test_wrong_arguments_are_refused(capsys, tmp_path):
    assert main(["check", str(tmp_path / "none.csv")]) == 2
    assert main(["schedule", "1f1b", "--stages", "0", "--microbatches", "3"]) == 2
    assert "num_stages must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["schedule", "zigzag", "--stages", "2", "--microbatches", "3"])


def test_help_and_schedules_do_not_import_torch():
    code = (
        "import sys\n"
        "from moe_pipeline.cli import main\n"
        "main(['schedule', '1f1b', '--stages', '2', '--microbatches', '2'])\n"
        "main(['plan', '--stages', '2', '--microbatches', '2', '--memory-cap', '4'])\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unread_output():
        assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 1
    assert capsys.readouterr().err == ""
