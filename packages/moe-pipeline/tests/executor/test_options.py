import dataclasses

import pytest
import torch

from moe_pipeline.executor.options import ExecutorOptions


def test_options_are_checked_when_made_and_stay_as_they_are():
    options = ExecutorOptions(device="cpu", timeout_s=2.5)
    assert not options.gradient_accumulation_fusion
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match="timeout_s=0 must be above 0, or None"):
        ExecutorOptions(timeout_s=0)
    with pytest.raises(ValueError, match="timeout_s must be finite and not negative, got -1"):
        ExecutorOptions(timeout_s=-1)
    with pytest.raises(TypeError, match="timeout_s must be a int or float, got a str"):
        ExecutorOptions(timeout_s="2")


def test_devices_are_torchs():
    assert ExecutorOptions(device=torch.device("cpu", 0)).device.index == 0
    with pytest.raises(ValueError, match=r"device='gpu': .* device string: gpu"):
        ExecutorOptions(device="gpu")
    with pytest.raises(TypeError, match="device must be a device or str, got a int"):
        ExecutorOptions(device=0)
