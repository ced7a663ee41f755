from dataclasses import replace

import pytest

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators.basic import one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES
from moe_pipeline.schedules.table.schedule import Action
from moe_pipeline.schedules.views.csv_file import from_csv, read_csv, to_csv


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trips(name):
    schedule = replace(SCHEDULES[name](3, 4), paired=frozenset())  # pairs are not written
    assert from_csv(to_csv(schedule), name=schedule.name, copies=schedule.copies) == schedule


def test_pairs_are_read_as_torch_writes_them():
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert [str(a) for a in schedule.ranks[0]] == ["0F0", "0F1", "0B0", "0B1"]
    assert schedule.paired == {Action.parse("0F1")}


def test_actions_on_sharded_parameters_and_waits_are_skipped():
    text = "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
    row = from_csv(text).ranks[0]
    assert [str(a) for a in row] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]


def test_csv_of_a_file_is_named_after_it(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(one_f_one_b(2, 2)), encoding="utf-8")
    assert read_csv(path).name == "mine"
    path.write_text(to_csv(one_f_one_b(2, 2)), encoding="utf-8-sig")  # as spreadsheets do
    assert read_csv(path).ranks == one_f_one_b(2, 2).ranks


def test_idle_cells_and_blank_lines_at_the_end_are_skipped():
    schedule = from_csv("0F0,,0B0\n,1F0, 1B0 ,\n\n \n")
    assert [[str(a) for a in row] for row in schedule.ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_an_idle_rank_keeps_its_row(idle):
    rows = list(one_f_one_b(2, 3).ranks)
    rows.insert(idle, ())
    schedule = replace(one_f_one_b(2, 3), ranks=tuple(rows))
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


@pytest.mark.parametrize("idle", [0, 1])
def test_a_blank_line_is_an_idle_rank_as_in_torch(idle):
    lines = ["0F0,0B0\n", "1F0,1B0\n"]
    lines.insert(idle, "\n")
    ranks = from_csv("".join(lines)).ranks
    assert [bool(row) for row in ranks] == [number != idle for number in range(3)]


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
