import torch

from moe_pipeline.executor.slots import Slots
from moe_pipeline.executor.stage_message import Announced
from moe_pipeline.schedules.table.schedule import Action

FIRST, SECOND = Action.parse("1RECV_F0"), Action.parse("1RECV_F1")


def of_rows(rows):
    return (Announced(0, "cuda", torch.float32, (rows, 4)),)


def test_two_steps_alike_are_expected_again_until_one_differs():
    slots, found = Slots(), []
    for rows in (3, 3, 3, 5, 3, 5, 5, 5):
        slots.begin()
        found.append(slots.of(FIRST))
        slots.saw(FIRST, of_rows(rows))
    three, five = of_rows(3), of_rows(5)
    assert found == [None, None, three, three, None, None, None, five]


def test_microbatches_have_slots_of_their_own_that_stay_through_a_step():
    slots = Slots()
    for _ in range(2):
        slots.begin()
        slots.saw(FIRST, of_rows(1))
        slots.saw(SECOND, ())
    slots.begin()
    slots.saw(FIRST, of_rows(7))  # read before the slot is asked for
    assert slots.of(FIRST) == of_rows(1) and slots.of(SECOND) == ()
    slots.begin()
    slots.begin()  # a step that failed: it saw nothing
    assert slots.of(FIRST) is None
