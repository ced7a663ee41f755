import os
import random

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A fresh seed for torch; set TEST_SEED to replay. Failures show it as captured output."""
    value = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"TEST_SEED={value}")
    torch.manual_seed(value)
    return value
