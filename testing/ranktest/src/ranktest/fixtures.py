"""Fixtures that several test folders share; a `conftest.py` imports those that it wants.

from ranktest.fixtures import one_thread as one_thread
from ranktest.fixtures import seed as seed
"""

import os
import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A fresh seed for torch; set TEST_SEED to replay. Failures show it as captured output."""
    value = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"TEST_SEED={value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors as small as the tests' only lose time to a pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
