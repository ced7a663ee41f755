from collections.abc import Callable

import pytest

from moe_train.config import Config
from moe_train.training.build import check_layout, read_model_config


def test_rows_that_grouped_mm_does_not_take_are_refused_before_ranks_start(
    configure: Callable[..., Config],
) -> None:
    grouped = "model.experts_implementation=grouped_mm"
    for keys, sizes, told in (
        ((), {"moe_intermediate_size": 6}, "moe_intermediate_size=6 in .*float32.* has 24"),
        (("train.dtype=bfloat16",), {"moe_intermediate_size": 12}, "=12 in .*bfloat16.* has 24"),
    ):
        config = configure(grouped, *keys, **sizes)
        with pytest.raises(ValueError, match=told):
            check_layout(config, read_model_config(config))
    fitting = configure(grouped, moe_intermediate_size=12)
    check_layout(fitting, read_model_config(fitting))
