"""The cost curve: what it says between knots, and what a fit makes of measurements."""

import math
import random
import statistics

import pytest

from comm_collectives.planning.cost_model import CostCurve, fit_cost_model


def test_line_is_latency_plus_bytes_over_bandwidth() -> None:
    curve = CostCurve.line(alpha_s=10e-6, bytes_per_s=50e9)
    assert curve.seconds(0) == 10e-6
    assert curve.seconds(5_000_000) == pytest.approx(110e-6)


def test_curve_is_constant_then_straight_between_knots_then_a_line() -> None:
    curve = CostCurve(knots=((100, 1.0), (200, 3.0), (400, 3.0)), bytes_per_s=100)
    assert [curve.seconds(n) for n in (0, 100, 150, 200, 300, 400)] == [1, 1, 2, 3, 3, 3]
    assert curve.seconds(600) == 5


def _link(num_bytes: float) -> float:
    """A link as measured ones are: slow start, a fast class, a slower one beyond a cache."""
    seconds = 20e-6 + min(num_bytes, 65536) / 4e9
    seconds += max(0.0, min(num_bytes, 2**21) - 65536) / 1.5e9
    return seconds + max(0.0, num_bytes - 2**21) / 0.5e9


def _errors(curve: CostCurve, sizes: list[float]) -> list[float]:
    return [abs(curve.seconds(size) / _link(size) - 1) for size in sizes]


def test_fit_predicts_sizes_it_has_not_seen_where_one_line_misses() -> None:
    seed = random.randrange(10**9)
    generator = random.Random(seed)
    sizes = [2.0**i for i in range(8, 25)]
    samples = [
        (size, _link(size) * generator.uniform(0.97, 1.03)) for size in sizes for _ in range(9)
    ]
    held_out = [size * 1.4 for size in sizes[:-1]]
    by_class = _errors(fit_cost_model(samples), held_out)
    one_line = _errors(fit_cost_model(samples, max_lines=1), held_out)
    assert statistics.median(by_class) < 0.05, f"seed {seed}"
    assert max(by_class) < 0.1, f"seed {seed}"
    assert max(one_line) > 0.3, f"seed {seed}"


def test_fit_of_two_sizes_is_the_line_through_them() -> None:
    curve = fit_cost_model([(1000, 2.0), (3000, 3.0)])
    assert curve.knots == ((1000, pytest.approx(2.0)), (3000, pytest.approx(3.0)))
    assert curve.seconds(5000) == pytest.approx(4.0)


def test_disturbed_measurements_do_no_harm() -> None:
    samples = [(size, size * 1e-9 + 1e-5) for size in (1e3, 1e4, 1e5, 1e6) for _ in range(5)]
    curve = fit_cost_model([*samples, (1e4, 10.0), (1e6, 10.0)])
    assert curve.seconds(1e4) == pytest.approx(2e-5)
    assert curve.seconds(1e6) == pytest.approx(1e-3 + 1e-5)


def test_fitted_time_never_falls_with_size() -> None:
    curve = fit_cost_model([(1, 5.0), (10, 3.0), (100, 4.0), (1000, 2.0)])
    times = [curve.seconds(n) for n in (0, 1, 5, 10, 50, 100, 1000, 10_000)]
    assert times == sorted(times)
    assert times[-1] > times[-2]


def test_lines_are_as_many_as_the_link_has_and_no_more() -> None:
    exact = [(2.0**i, _link(2.0**i)) for i in range(8, 25)]
    knots = [num_bytes for num_bytes, _ in fit_cost_model(exact).knots]
    assert {2**8, 2**16, 2**21, 2**24} <= set(knots)
    assert len(knots) <= 5  # a knot that helped early on stays
    assert len(fit_cost_model(exact, max_lines=2).knots) == 3


def test_noise_is_not_taken_for_more_lines() -> None:
    line = CostCurve.line(alpha_s=1e-4, bytes_per_s=1e9)
    knots = []
    for seed in range(20):
        generator = random.Random(seed)
        samples = [
            (2.0**i, line.seconds(2.0**i) * generator.uniform(0.9, 1.1)) for i in range(8, 25)
        ]
        knots.append(len(fit_cost_model(samples).knots))
    assert knots.count(2) > 10  # one line


@pytest.mark.parametrize(
    ("samples", "max_lines", "message"),
    [
        ([(100, 1.0), (100, 2.0)], 4, "1 different sizes cannot show"),
        ([(0, 1.0), (100, 2.0)], 4, r"sample \(0, 1.0\) must be"),
        ([(10, math.nan), (100, 2.0)], 4, "must be .* both positive"),
        ([(10, 1.0), (100, 2.0)], 0, "max_lines=0 must be at least 1"),
    ],
)
def test_unusable_samples_are_refused(
    samples: list[tuple[float, float]], max_lines: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cost_model(samples, max_lines=max_lines)


@pytest.mark.parametrize(
    ("knots", "bandwidth", "message"),
    [
        ((), 1.0, "knots is empty"),
        (((0, -1.0),), 1.0, "must be .* both >= 0"),
        (((0, 1.0), (0, 2.0)), 1.0, "bytes must rise"),
        (((0, 2.0), (1, 1.0)), 1.0, "seconds must not fall"),
        (((0, 1.0),), 0.0, "bytes_per_s=0.0 must be positive"),
    ],
)
def test_unusable_curves_are_refused(
    knots: tuple[tuple[float, float], ...], bandwidth: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(knots=knots, bytes_per_s=bandwidth)
