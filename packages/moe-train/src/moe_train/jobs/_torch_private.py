"""What moe-train takes from torch's private parts. Tested against torch 2.11 to 2.15."""

from torch.testing._internal.distributed.fake_pg import FakeStore


def fake_store() -> FakeStore:
    """A store for process groups of the "fake" backend, which importing this module registers."""
    return FakeStore()
