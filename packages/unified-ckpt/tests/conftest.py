"""One saver process for all tests that need no other settings: each start imports torch again."""

from collections.abc import Iterator

import pytest

from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver


@pytest.fixture(scope="session")
def saver() -> Iterator[AsyncSaver]:
    config = AsyncSaverConfig(timeout_s=20.0, start_timeout_s=60.0, orphan_grace_s=1.0)
    with AsyncSaver(config=config) as saver:
        yield saver
