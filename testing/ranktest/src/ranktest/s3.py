"""A server that speaks S3 on this machine, and what clients must know of it.

moto's by default: it is slow, but behaves as S3 does. It ends with the process that started it.

    with start_s3() as server:
        server.make_bucket("runs")
        os.environ |= server.environment
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from urllib.request import Request, urlopen

_MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server(AbstractContextManager["S3Server"]):
    """A running server; its end is that of the `with` or of `close`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        port = process.stdout.readline().strip() if process.stdout is not None else ""
        if not port:
            raise RuntimeError("the server of objects did not start; is moto[server] installed?")
        self.endpoint = f"http://127.0.0.1:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every client finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "access-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self, name: str) -> str:
        """Make an empty bucket; return its URL."""
        urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=60).read()
        return f"s3://{name}"

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def start_s3(program: Sequence[str] = ("-W", "ignore", "-c", _MOTO)) -> S3Server:
    """Start a server, whose program prints its port and ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return S3Server(process)
