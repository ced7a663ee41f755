"""What all tests share because it takes seconds to start: a saver process, a server of objects."""

import secrets
from collections.abc import Iterator

import pytest

from ranktest.s3 import S3Server, start_s3
from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver


@pytest.fixture(scope="session")
def saver() -> Iterator[AsyncSaver]:
    config = AsyncSaverConfig(timeout_s=20.0, start_timeout_s=60.0, orphan_grace_s=1.0)
    with AsyncSaver(config=config) as saver:
        yield saver


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server that speaks S3 (moto's), on this machine."""
    with start_s3() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, for which the environment has all that a client needs.

    Only processes that a test starts may use it: an object store's client does not survive a fork,
    and all ranks of tests are forked from this process.
    """
    for variable, value in s3_server.environment.items():
        monkeypatch.setenv(variable, value)
    return s3_server.make_bucket(f"bucket-{secrets.token_hex(4)}")
