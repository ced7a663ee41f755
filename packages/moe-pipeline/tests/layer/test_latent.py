import pytest
import torch

from moe_pipeline.config import MoEConfig
from moe_pipeline.layer.latent import latent_projections

SIZES = dict(hidden_size=12, moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1)


def test_projections_go_into_the_latent_width_and_back(seed):
    into, out = latent_projections(
        MoEConfig(**SIZES, moe_latent_size=3, initializer_range=0.1), dtype=torch.float64
    )
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(out(into(x)), x @ into.weight.t() @ out.weight.t())
    assert into(x).shape == (5, 3)
    assert into.bias is None
    assert 0.0 < into.weight.abs().max() < 1.0


def test_config_without_a_latent_width_is_refused():
    with pytest.raises(ValueError, match="moe_latent_size"):
        latent_projections(MoEConfig(**SIZES))
