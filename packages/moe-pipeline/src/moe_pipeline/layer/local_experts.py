"""The experts that one rank holds: parameters with transformers' names and layouts.

Under expert tensor parallelism (etp) a rank holds H / etp of each expert's gate, up and down, and
its output is a part of the sum over the ranks; `down_proj_bias` is a parameter of rank 0 alone and
None elsewhere, so that the sum holds it once.

    experts = Experts(config, num_local_experts=8)
    y_RD = experts(x_RD, (3, 0, 5, 1, 0, 0, 2, 1), topk_weights_R)

Dims: R rows sorted by expert, T tokens, K choices, D wide, H intermediate, E local experts, G = 2H.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from moe_pipeline._checks import check_count, check_type
from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoEValueError
from moe_pipeline.experts import ExpertWeights, experts_function, token_experts_function
from moe_pipeline.weight_grad import InPlaceAccumulation


@final
class Experts(nn.Module):
    """The experts that one rank holds; see the module's docstring.

    With `gradient_accumulation_fusion` the products of a backward add themselves to the parameters'
    `grad`, whose memory is kept over steps: `moe_pipeline.weight_grad.accumulation`.

    Args:
        config: sizes, activation, implementation.
        num_local_experts: E; None: all experts of the layer.
        etp_rank: which slice of each expert this rank holds.
        etp_size: into how many slices experts are cut.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: `moe_intermediate_size` is not divisible by `etp_size`, or
            `gradient_accumulation_fusion` with an implementation that has none.
    """

    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        num_local_experts: int | None = None,
        etp_rank: int = 0,
        etp_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_type("config", config, MoEConfig)
        super().__init__()
        self.config = config
        options = config.experts
        _check_options(config, etp_rank, etp_size)
        local = config.num_experts if num_local_experts is None else num_local_experts
        check_count("num_local_experts", local, 0)
        d, h = config.expert_size, config.moe_intermediate_size // etp_size
        g = 2 * h if options.has_gate else h

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(local, *shape, device=device, dtype=dtype))

        self._first = first = "gate_up_proj" if options.has_gate else "up_proj"
        self.register_parameter(first, parameter(g, d))
        self.down_proj = parameter(d, h)
        if options.has_bias:
            self.register_parameter(f"{first}_bias", parameter(g))
            self.register_parameter("down_proj_bias", parameter(d) if etp_rank == 0 else None)
        fuses = options.gradient_accumulation_fusion
        self._accumulation = InPlaceAccumulation(keeps_memory=True) if fuses else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections from a normal distribution with `initializer_range`; biases are 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range)

    @property
    def weights(self) -> ExpertWeights:
        """The parameters, as the implementations take them."""
        has_bias = self.config.experts.has_bias
        return ExpertWeights(
            gate_up_EGD=getattr(self, self._first),
            down_EDH=self.down_proj,
            gate_up_bias_EG=getattr(self, f"{self._first}_bias") if has_bias else None,
            down_bias_ED=self.down_proj_bias if has_bias else None,
            accumulation=self._accumulation,
        )

    def forward(
        self, x_RD: Tensor, num_tokens_per_expert: Sequence[int], topk_weights_R: Tensor
    ) -> Tensor:
        """Apply each row's expert and weight. Not collective.

        Args:
            x_RD: [R, D] rows sorted by local expert, in the dtype of the parameters.
            num_tokens_per_expert: rows of each local expert; sums to R; zeros allowed.
            topk_weights_R: [R] router weights, any float dtype.

        Returns:
            [R, D], same dtype as `x_RD`. Under etp: this rank's part of the sum.

        Raises:
            ValueError: shapes or counts that do not fit.
            TypeError: `x_RD` in another dtype than the parameters.
        """
        return experts_function(
            x_RD, topk_weights_R, self.weights, num_tokens_per_expert, self.config.experts
        )

    def forward_tokens(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Send each token through its experts, where this rank has all of them. Not collective.

        It saves less for the backward than `forward` on a row for each choice. Hooks on this module
        act on its calls, so on `forward` alone; a layer whose experts have some calls them.

        Args:
            x_TD: [T, D] tokens, in the dtype of the parameters.
            topk_idx_TK: int64 [T, K], the experts of each token; -1 for none.
            topk_weights_TK: [T, K] router weights, any float dtype.

        Returns:
            [T, D], each token's weighted sum, same dtype as `x_TD`.

        Raises:
            ValueError: shapes that do not fit, or a number that is no expert's.
            TypeError: `x_TD` in another dtype than the parameters, or other integers.
        """
        return token_experts_function(
            x_TD, topk_idx_TK, topk_weights_TK, self.weights, self.config.experts
        )


def _check_options(config: MoEConfig, etp_rank: int, etp_size: int) -> None:
    h, options = config.moe_intermediate_size, config.experts
    check_count("etp_size", etp_size)
    if h % etp_size:
        raise MoEValueError(
            f"etp axis has {etp_size} ranks but moe_intermediate_size={h}; choose a divisor of {h}"
        )
    if not 0 <= etp_rank < etp_size:
        raise MoEValueError(f"etp_rank={etp_rank} is not in 0..{etp_size - 1}")
    if options.gradient_accumulation_fusion and options.experts_implementation not in (
        "auto",
        "fused",
    ):
        raise MoEValueError(
            "gradient_accumulation_fusion is of experts_implementation='fused' (or 'auto'), got "
            f"{options.experts_implementation!r}; change one of them"
        )
