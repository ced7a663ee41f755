"""What moe-train takes from torch's private parts. Tested against torch 2.11 to 2.15."""

from functools import cache

import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def fake_store() -> FakeStore:
    """A store for process groups of the "fake" backend, which importing this module registers."""
    return FakeStore()


@cache
def know_fp8_products() -> torch.library.Library | None:
    """Teach torch 2.11 the shapes of grouped products in fp8, which later ones know.

    Kept for the rest of the process.
    """
    name = "_scaled_grouped_mm_v2"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        return None

    def product(rows: Tensor, weight: Tensor, *rest: object, **named: object) -> Tensor:
        return rows.new_empty((rows.shape[0], weight.shape[-1]), dtype=torch.bfloat16)

    library = torch.library.Library("aten", "IMPL")
    library.impl(name, product, "Meta")
    return library
