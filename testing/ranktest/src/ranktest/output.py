"""The output of a command whose reader, such as `head`, has closed the pipe.

with unread_output():
    assert main(["plan", "job.toml"]) == 1
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def unread_output() -> Iterator[None]:
    """Make standard output a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, redirect_stdout(pipe):
        yield
