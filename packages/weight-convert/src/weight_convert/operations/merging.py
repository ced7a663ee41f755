"""The operation that makes one weight of those of several models.

Combine(method="linear", weights=(0.5, 0.5))
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from weight_convert.operations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine(Operation):
    """One input a model, after that of the base where the method has one.

    Attributes:
        method: one of `METHODS`.
        weights: one a model; of `slerp`, (1 - t, t).
        densities: part of a model's differences from the base that stays, one a model.
        scale: of the sum of differences.
        normalize: whether weights are divided by their sum (of those that count, with `ties`).
        gamma: part of the largest differences that `breadcrumbs` drops.
        epsilon: by how much `della` keeps the largest of a row more often, and the smallest less;
            at most the density and 1 - density.
        seed: of what is drawn at random, for this tensor.
    """

    # A megabyte of float32, which stays in the cache between operations.
    CHUNK_ELEMENTS: ClassVar[int] = 1 << 18
    # Whether a method sums differences of the models from a base.
    METHODS: ClassVar[Mapping[str, bool]] = {
        "linear": False,
        "slerp": False,
        "task_arithmetic": True,
        "ties": True,
        "dare_linear": True,
        "dare_ties": True,
        "breadcrumbs": True,
        "breadcrumbs_ties": True,
        "della_linear": True,
        "della": True,
        "model_stock": True,
    }

    method: str
    weights: tuple[float, ...]
    densities: tuple[float, ...] = ()
    scale: float = 1.0
    normalize: bool = False
    gamma: float = 0.0
    epsilon: float = 0.0
    seed: int = 0
