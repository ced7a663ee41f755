"""What a group of NCCL's rules is told: how much it buffers, and which transfers share an order.

NcclRules(buffering="none", order="pair")
"""

import math
from dataclasses import dataclass

from devicetest.machine import Machine

BUFFERS = {"none": 0.0, "small": 4096.0, "full": math.inf}
ORDERS = ("pair", "communicator", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRules:
    """How a group behaves.

    Attributes:
        buffering: "none": a send ends when it is received; "small": up to 4096 bytes a channel lie
            in a buffer; "full": no send waits.
        order: "pair": single transfers of two ranks have an order of their own, as in a group
            without `device_id`; "communicator": all calls of the group have one order, as in a
            group with `device_id`; "device": all calls of a rank have one order, whatever their
            group, as under CUDA_DEVICE_MAX_CONNECTIONS=1. Batches and collectives are in the
            group's order in all of them.
        any_device: take tensors of the CPU too, for tests of the order alone.
        host: tensors of the CPU go over gloo, as in a group of "cpu:gloo,cuda:nccl".
        machine: the fake devices, where there are some.
        watchdog: nobody names a deadlock, a dead rank or collectives that differ: what never ends
            is waited for, until the group's limit has passed and the process is killed, as torch's
            watchdog does it.
    """

    buffering: str = "none"
    order: str = "pair"
    any_device: bool = True
    host: bool = False
    machine: Machine | None = None
    watchdog: bool = False

    def __post_init__(self) -> None:
        if self.buffering not in BUFFERS:
            raise ValueError(f"buffering={self.buffering!r}; choose one of {sorted(BUFFERS)}")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}; choose one of {ORDERS}")
