import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.generators import GENERATORS, one_f_one_b
from moe_pipeline.schedule_csv import from_csv, read_csv, to_csv


@pytest.mark.parametrize("name", GENERATORS)
def test_csv_round_trips(name):
    schedule = GENERATORS[name](3, 4)
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_csv_of_a_file_is_named_after_it(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(one_f_one_b(2, 2)), encoding="utf-8")
    assert read_csv(path).name == "mine"


def test_idle_cells_and_blank_lines_are_skipped():
    schedule = from_csv("0F0,,0B0\n\n,1F0, 1B0 ,\n")
    assert [[str(a) for a in row] for row in schedule.ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_schedules_exported_by_torch_load():
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = "\n".join(
        ",".join(map(str, row))
        for row in (
            [pipelining._Action.from_str(a) for a in ("0F0", "0SEND_F0", "0RECV_B0", "0B0")],
            [pipelining._Action.from_str(a) for a in ("1RECV_F0", "1F0", "1B0", "1SEND_B0")],
        )
    )
    assert from_csv(text, name="1f1b") == one_f_one_b(2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no actions"),
        (",,\n", "has no actions"),
        ("0F0,0Q0\n", "row 0, cell 1: '0Q0' is not an action"),
        ("0F0,0F999999999999\n", "has 2 actions, too few for 1 stages and 1000000000000"),
    ],
)
def test_bad_csv_is_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        from_csv(text)
