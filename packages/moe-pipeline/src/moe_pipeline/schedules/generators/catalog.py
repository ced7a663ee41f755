"""Every named schedule, by name: `SCHEDULES[name](ranks, microbatches)`.

schedule = SCHEDULES["zbv"](4, 8)
"""

from collections.abc import Callable

from moe_pipeline.schedules.generators.basic import forward_only, forward_then_backward, one_f_one_b
from moe_pipeline.schedules.generators.dual_pipe import dualpipe, dualpipe_v
from moe_pipeline.schedules.generators.interleaved import (
    interleaved_1f1b,
    interleaved_forward_only,
    interleaved_forward_then_backward,
    looped_bfs,
)
from moe_pipeline.schedules.generators.interleaved_zb import interleaved_zero_bubble
from moe_pipeline.schedules.generators.v_shaped import v_half, v_min, zbv
from moe_pipeline.schedules.generators.zero_bubble import zb_1p, zb_2p
from moe_pipeline.schedules.table import Schedule

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "forward_then_backward": forward_then_backward,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "interleaved_forward_then_backward": interleaved_forward_then_backward,
    "interleaved_forward_only": interleaved_forward_only,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
}
