import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = str(Path(__file__).with_name("on_stub.py"))


@pytest.fixture(scope="session")
def facts_on_stub() -> Callable[[str], dict[str, Any]]:
    """What `on_stub.py` finds in a mode, on a device of 1 GiB that is not there."""
    stub = pytest.importorskip("devicetest.cuda_stub")
    found: dict[str, dict[str, Any]] = {}

    def facts(mode: str) -> dict[str, Any]:
        if mode not in found:
            try:
                done = stub.run_on_stub(PROGRAM, mode, "1.5", gpu_bytes=1 << 30)
            except stub.StubUnavailableError as error:
                pytest.skip(f"no stub of CUDA here: {error}")
            assert done.returncode == 0, done.stderr[-2000:]
            found[mode] = json.loads(done.stdout)
        return found[mode]

    return facts
