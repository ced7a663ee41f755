"""Changes in place are noticed, cheaply by count and in debug mode by content."""

import numpy as np
import torch

from comm_collectives.call.handles import debug_mode
from comm_collectives.call.handles.watch import Watch


def test_untouched_tensors_have_not_changed() -> None:
    x = torch.arange(4).view(2, 2)
    watch = Watch([x, x.t()])
    x.sum()
    assert watch.changed() == []


def test_changes_through_torch_are_noticed_also_through_a_view() -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    watch = Watch([x, y])
    y[1:].add_(1)
    assert watch.changed() == [1]


def test_a_change_beside_a_part_of_a_memory_is_none_of_it() -> None:
    x = torch.zeros(2, 3)
    plain = Watch([x[0], x.view(-1)])
    with debug_mode():
        careful = Watch([x[0], x[1]])
    x[1].add_(1)
    assert plain.changed() == [1]
    assert careful.changed() == [1]


def test_changes_behind_torch_are_noticed_in_debug_mode_only() -> None:
    array = np.zeros(3, dtype=np.float32)
    x = torch.from_numpy(array)
    plain = Watch([x])
    with debug_mode():
        careful = Watch([x])
    array[1] = 1
    assert plain.changed() == []
    assert careful.changed() == [0]


def test_nan_and_negative_zero_are_compared_as_bytes() -> None:
    x = torch.tensor([float("nan"), -0.0])
    with debug_mode():
        watch = Watch([x])
    assert watch.changed() == []


def test_inference_tensors_can_be_watched() -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
        assert Watch([x]).changed() == []
