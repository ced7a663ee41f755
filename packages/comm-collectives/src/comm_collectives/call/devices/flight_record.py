"""What torch's flight recorder says of a group that hangs: the oldest work that has not ended.

Only where the user has switched the recorder on by its variable: torch asks the device's events
when it is read, which nothing else here does. No record, or no recorder, is no error.

    unfinished_work("0")
"""

import json
import os
from typing import Any

from comm_collectives._torch_private import dump_flight_records

SETTINGS = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)  # its name in new and in older torch


def is_recording() -> bool:
    """Whether a variable of torch's gives its flight recorder room for entries."""
    values = [os.environ.get(name, "").strip() for name in SETTINGS]
    return any(value.isdecimal() and int(value) > 0 for value in values)


def unfinished_work(group_name: str) -> str:
    """Say what this process' recorder has not seen end, by torch's name of the group; "" if none.

    Reads the recorders of NCCL and gloo, and asks devices for their events.
    """
    if not is_recording():
        return ""
    open_entries = [
        entry
        for dump in dump_flight_records()
        for entry in json.loads(dump).get("entries", ())
        if entry.get("process_group", [None])[0] == group_name and not _has_ended(entry)
    ]
    if not open_entries:
        return ""
    oldest = min(open_entries, key=lambda entry: int(entry.get("time_created_ns", 0)))
    number = oldest.get("p2p_seq_id" if oldest.get("is_p2p") else "collective_seq_id")
    more = f", and {len(open_entries) - 1} behind it" if len(open_entries) > 1 else ""
    return (
        f"torch's flight recorder: {oldest.get('profiling_name')} number {number} of "
        f"{oldest.get('input_sizes')} is {oldest.get('state')} and has not ended{more}"
    )


def _has_ended(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"
