"""What all tests share because it takes seconds to start: a saver process, a server of objects."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

from unified_ckpt.background.config import AsyncSaverConfig
from unified_ckpt.background.saver import AsyncSaver


@pytest.fixture(scope="session")
def saver() -> Iterator[AsyncSaver]:
    config = AsyncSaverConfig(timeout_s=20.0, start_timeout_s=60.0, orphan_grace_s=1.0)
    with AsyncSaver(config=config) as saver:
        yield saver


_SERVER = """
import logging, sys, time
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of a server that speaks S3 (moto's), on this machine."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, for which the environment has all that a client needs.

    Only processes that a test starts may use it: an object store's client does not survive a fork,
    and all ranks of tests are forked from this process.
    """
    name = f"bucket-{secrets.token_hex(4)}"
    urlopen(Request(f"{s3_endpoint}/{name}", method="PUT"), timeout=60).read()
    settings = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "access-of-the-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    return f"s3://{name}"
