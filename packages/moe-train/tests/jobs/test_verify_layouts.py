import logging
from collections.abc import Callable

import pytest

from moe_train.config import Config
from moe_train.jobs.layout_choice import JobLayout
from moe_train.jobs.verify_layouts import LayoutReport, LayoutRun, checked_job


def run_of(losses: tuple[float, ...], norms: tuple[float, ...], dp: int = 1) -> LayoutRun:
    keys = (("parallel.pp", 1), ("parallel.dp", dp), ("parallel.ep", 1))
    more = (("parallel.schedule", "1f1b"), ("train.gradient_accumulation_steps", 2))
    layout = JobLayout(keys=keys + more)
    return LayoutRun(layout=layout, losses=losses, norms=norms)


def test_the_largest_difference_of_any_step_decides() -> None:
    first, other = run_of((4.0, 2.0), (1.0, 0.5)), run_of((4.0, 2.0 + 3e-6), (1.0, 0.5), dp=2)
    assert other.apart(first) == (pytest.approx(1.5e-6), 0.0)
    assert LayoutReport(runs=(first, other), limit=2e-6).holds
    report = LayoutReport(runs=(first, other), limit=1e-6)
    assert not report.holds
    _, one, two, verdict = report.text.splitlines()
    assert one.startswith("one rank, 1f1b, 2 microbatches") and "above" not in one
    assert two.startswith("dp=2, 1f1b") and "1.5e-06" in two and two.endswith("above 1e-06")
    assert "DO NOT hold to 1e-06" in verdict


def test_norms_count_as_losses_do_and_a_loss_that_is_no_number_never_holds() -> None:
    first = run_of((4.0,), (1.0,))
    assert not LayoutReport(runs=(first, run_of((4.0,), (1.1,), 2)), limit=1e-6).holds
    no_number = float("nan")
    assert not LayoutReport(runs=(first, run_of((no_number,), (1.0,), 2)), limit=1e-6).holds
    assert not LayoutReport(runs=(first, run_of((4.0,), (no_number,), 2)), limit=1e-6).holds


@pytest.mark.parametrize(
    "keys",
    [
        ("train.stochastic_rounding=true",),
        ("train.master_weights=true", "train.grad_reduce_dtype=bfloat16"),
        ("model.experts_fp8=true",),
        ("moe.dispatch_backend=deepep",),
        ("moe.dispatch_payload=int8", "moe.dispatch_quantize_backward=true"),
    ],
)
def test_what_rounds_to_few_bits_is_compared_without_in_a_line_each(
    configure: Callable[..., Config], caplog: pytest.LogCaptureFixture, keys: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO)
    config, _ = checked_job(configure("train.dtype=bfloat16", *keys), 2)
    assert config.train.dtype == config.train.state_dtype == "float32"
    for key in ("train.dtype=bfloat16", *keys):
        line = f"{key.replace('true', 'True')}: compared with "
        assert [record for record in caplog.messages if record.startswith(line)], line
    assert (config.model.experts_fp8, config.moe.dispatch_payload) == (False, "full")
