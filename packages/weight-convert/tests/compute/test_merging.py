import math
import random

import pytest
import torch

from weight_convert.compute import merging
from weight_convert.operations import Combine

SHAPES = [(6, 7), (11,), (2, 3, 5), (1,)]


@pytest.fixture(params=[4, 1 << 18])
def chunk(request, monkeypatch):
    monkeypatch.setattr(merging, "CHUNK_ELEMENTS", request.param)
    return request.param


def tensors(shape, number=3, dtype=torch.bfloat16):
    """Models that differ a little from the first, with many equal differences."""
    base = torch.randn(shape)
    steps = [(torch.randn(shape) * 4).round() / 64 for _ in range(number)]
    return [base.to(dtype), *((base.to(dtype).float() + step).to(dtype) for step in steps)]


def test_a_linear_merge_is_the_sum_in_float32(compute, chunk) -> None:
    for shape in SHAPES:
        parts = tensors(shape)
        weights = tuple(random.uniform(-1, 2) for _ in parts)
        for normalize in (False, True):
            operation = Combine(method="linear", weights=weights, normalize=normalize)
            total = math.fsum(weights) if normalize else 1.0
            expected = torch.zeros(shape)
            for part, weight in zip(parts, weights, strict=True):
                expected = expected + part.float() * (weight / total)
            found = compute(operation, parts, torch.bfloat16, shape)
            assert torch.equal(found, expected.bfloat16())


def slerp(a, b, t):
    a, b = a.double(), b.double()
    cosine = (a * b).sum() / (a.norm() * b.norm())
    if cosine.abs() > 0.9995:
        return (1 - t) * a + t * b
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def test_slerp_goes_along_the_arc_and_a_line_where_there_is_none(compute, chunk) -> None:
    for shape in SHAPES:
        for a, b in (torch.randn(2, *shape), torch.ones(2, *shape), torch.zeros(2, *shape)):
            t = random.random()
            operation = Combine(method="slerp", weights=(1 - t, t))
            found = compute(operation, [a, b], torch.float32, shape)
            expected = slerp(a, b, t) if a.any() else a.double()
            assert torch.allclose(found.double(), expected, atol=1e-6)


def stock(base, models):
    deltas = [(m.double() - base.double()).flatten() for m in models]
    n = len(deltas)
    cosines = [
        torch.nn.functional.cosine_similarity(deltas[i], deltas[j], dim=0)
        for i in range(n)
        for j in range(i)
    ]
    cosine = sum(cosines) / len(cosines)
    t = n * cosine / (1 + (n - 1) * cosine)
    return t * sum(m.double() for m in models) / n + (1 - t) * base.double()


def test_model_stock_weighs_by_the_mean_angle(compute, chunk) -> None:
    for shape in ((6, 7), (2, 3, 5)):
        base, *models = tensors(shape, dtype=torch.float32)
        operation = Combine(method="model_stock", weights=(1.0,) * 3, densities=(1.0,) * 3)
        found = compute(operation, [base, *models], torch.float32, shape)
        assert torch.allclose(found.double(), stock(base, models), atol=1e-5)


def keep_largest(delta, top, kept):
    order = delta.flatten().abs().sort(descending=True, stable=True).indices
    mask = torch.zeros(delta.numel())
    mask[order[top : top + kept]] = 1
    return delta * mask.view(delta.shape)


def elect(parts, weights, normalize):
    stacked = torch.stack(parts)
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agree = stacked.sign() == sign
    share = sum(w * a for w, a in zip(weights, agree, strict=True))
    total = (stacked * agree).sum(0)
    return total / torch.where(share.abs() < 1e-8, 1.0, share) if normalize else total


def reference(operation, base, models):
    """Each method in a few lines, on whole tensors."""
    parts = []
    for number, (model, weight) in enumerate(zip(models, operation.weights, strict=True)):
        delta = model.float() - base.float()
        density, total = (*operation.densities, 1.0)[number], delta.numel()
        draw = torch.Generator().manual_seed(operation.seed + number)
        if operation.method == "ties":
            delta = keep_largest(delta, 0, int(density * total))
        elif operation.method.startswith("breadcrumbs"):
            top = int(operation.gamma * total)
            delta = keep_largest(delta, top, int(density * total))
        elif operation.method.startswith("dare"):
            kept = torch.rand(total, generator=draw).view(delta.shape) < density
            delta = delta / density * kept
        elif operation.method.startswith("della"):
            ranks = delta.abs().sort(dim=-1, stable=True).indices.argsort(dim=-1)
            low, n = density - operation.epsilon, delta.shape[-1]
            chance = low + 2 * operation.epsilon * ranks / max(n - 1, 1) if n > 1 else density
            kept = torch.rand(total, generator=draw).view(delta.shape) < chance
            delta = delta / chance * kept
        parts.append(delta * weight)
    if operation.method in ("ties", "dare_ties", "breadcrumbs_ties", "della"):
        change = elect(parts, operation.weights, operation.normalize)
    else:
        change = sum(parts) / (sum(operation.weights) if operation.normalize else 1)
    return base.float() + operation.scale * change


@pytest.mark.parametrize(
    "method",
    sorted(name for name in Combine.METHODS if Combine.METHODS[name] and name != "model_stock"),
)
@pytest.mark.parametrize("normalize", [False, True])
def test_methods_with_a_base_are_their_reference(compute, chunk, method, normalize) -> None:
    for shape in SHAPES:
        base, *models = tensors(shape)
        operation = Combine(
            method=method,
            weights=tuple(random.uniform(0.1, 1) for _ in models),
            densities=tuple(random.uniform(0.2, 0.8) for _ in models),
            scale=random.uniform(0.5, 1.5),
            normalize=normalize,
            gamma=0.1,
            epsilon=0.15,
            seed=random.randrange(10**6),
        )
        found = compute(operation, [base, *models], torch.float32, shape)
        assert torch.allclose(found, reference(operation, base, models), atol=1e-5), operation


@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_della_keeps_all_at_density_1_and_the_sum_of_differences_at_others(compute, method) -> None:
    base, model = torch.zeros(40, 500), torch.randn(40, 500)
    for density, epsilon in ((1.0, 0.1), (0.95, 0.3), (0.2, 0.4)):
        operation = Combine(
            method=method, weights=(1.0,), densities=(density,), epsilon=epsilon, seed=3
        )
        found = compute(operation, [base, model], torch.float32, (40, 500))
        # numbers that are kept are divided by a probability, which makes none smaller
        assert ((found == 0) | (found.abs() >= model.abs())).all()
        assert abs(float(found.abs().sum() / model.abs().sum()) - 1) < 0.1
        if density == 1:
            assert torch.equal(found, model)
