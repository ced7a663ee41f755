"""AdamW over this rank's parameters, with fp32 master weights as an option.

The update itself is torch's fused AdamW; what stands here is what training adds: names for the
state (so that it can be saved under any layout), and master weights.
"""

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
        self.late: dict[str, int] = {}
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

    def updated(self) -> dict[str, Tensor]:
        """Parameter name -> the tensor that updates change: its master weights or itself."""
        return {name: tensor.data for name, tensor in self._updated.items()}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moment name -> parameter name -> tensor shaped as the parameter; views, not copies."""
        return {
            moment: {name: self._torch.state[t][moment] for name, t in self._updated.items()}
            for moment in MOMENTS
        }

    def set_step(self, step: int, late: Mapping[str, int] | None = None) -> None:
        """Tell the bias correction how many updates have been applied.

        Args:
            late: name -> updates before the parameter was trained, kept as `self.late`.
        """
        self.late = dict(late or {})
        for name, tensor in self._updated.items():
            self._torch.state[tensor]["step"].fill_(float(step - self.late.get(name, 0)))
