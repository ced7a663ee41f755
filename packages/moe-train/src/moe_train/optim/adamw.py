"""AdamW over this rank's parameters, with fp32 master weights as an option.

The update itself is torch's fused AdamW; what stands here is what training adds: names for the
state (so that it can be saved under any layout), master weights, and the learning-rate curve.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_train.config import OptimizerConfig
from moe_train.model import decays
from moe_train.optim.grads import GradientStore

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """torch's AdamW on named parameters; weight decay on matrices only.

    Args:
        parameters: name -> parameter.
        config: learning rate, betas, decay.
        master_weights: keep an fp32 copy of every parameter, update it, and round it back.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        master_weights: bool,
    ) -> None:
        self._parameters = dict(parameters)
        self.master: dict[str, Tensor] = {}
        if master_weights:
            self.master = {n: p.detach().float().clone() for n, p in parameters.items()}
        updated = self.master or {name: p.data for name, p in parameters.items()}
        self._updated = {name: nn.Parameter(t, requires_grad=True) for name, t in updated.items()}
        decayed = [t for name, t in self._updated.items() if decays(name, t.shape)]
        others = [t for name, t in self._updated.items() if not decays(name, t.shape)]
        self._torch = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for tensor in self._updated.values():
            # Made here and not on the first step, so that there is always a state to save or load.
            self._torch.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{moment: torch.zeros_like(tensor) for moment in MOMENTS},
            }

    def step(self, gradients: GradientStore, lr: float) -> None:
        """Apply one update with learning rate `lr`."""
        for name, tensor in self._updated.items():
            tensor.grad = gradients.of(self._parameters[name])
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        for name, tensor in self._updated.items():
            tensor.grad = None
            if self.master:
                self._parameters[name].data.copy_(tensor.data)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment name -> parameter name -> tensor shaped as the parameter; views, not copies."""
        return {
            moment: {name: self._torch.state[t][moment] for name, t in self._updated.items()}
            for moment in MOMENTS
        }

    def set_step(self, step: int) -> None:
        """Tell the bias correction how many updates have been applied."""
        for tensor in self._updated.values():
            self._torch.state[tensor]["step"].fill_(float(step))

    def master_from_parameters(self) -> None:
        """Restart the master weights from the parameters, when a checkpoint holds none."""
        for name, tensor in self.master.items():
            tensor.copy_(self._parameters[name].data)


def learning_rate(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """The rate of update number `step` (from 1): linear warm-up, then decay to the minimum."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
