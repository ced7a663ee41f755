"""Which parameters tensor-parallel ranks share out, and along which dim.

Attention is cut by heads, a dense MLP or a shared expert by its inner width: what comes first
(queries, keys, values, gate, up) by rows, what comes last (`o_proj`, `down_proj`) by columns.
Embedding and head are cut by rows of the vocabulary. All else is whole on each rank: norms,
routers, biases behind a sum, latents' first projections. Experts have axes of their own over the
ranks of a stage: neighbours share out the inner width of each (etp), and then ep the experts.

    dim = tensor_cut("model.layers.0.self_attn.o_proj.weight", config, tp=2)     # 1
    tensor_spec(stage_mesh, dim, shape, tp=2)
"""

from collections.abc import Sequence

from torch.distributed.tensor import Shard as DimShard

from mesh_spmd import ProcessMesh, Spec
from moe_train.model import EMBEDDING, DecoderConfig
from moe_train.model.parallel import PositionCut

TENSOR_AXIS, EXPERT_AXIS = "tp", "etp"
BY_TOKEN = frozenset({EMBEDDING, "lm_head.weight"})
"""What has a row for each token of the vocabulary."""
_KEYS = tuple(f"self_attn.{each}_proj.{kind}" for each in "kv" for kind in ("weight", "bias"))
_CUT_DIMS = dict.fromkeys(_KEYS, 0) | {
    "self_attn.q_proj.weight": 0,
    "self_attn.q_proj.bias": 0,
    "self_attn.q_b_proj.weight": 0,
    "self_attn.kv_b_proj.weight": 0,
    "self_attn.sinks": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
    "shared_experts.gate_proj.weight": 0,
    "shared_experts.up_proj.weight": 0,
    "shared_experts.down_proj.weight": 1,
}


def tensor_cut(name: str, config: DecoderConfig, tp: int) -> int | None:
    """The dim of a parameter that `tp` ranks share out; None: each has all of it.

    Keys and values of fewer heads than ranks, or of heads that do not divide, are whole everywhere.
    """
    if name in BY_TOKEN:
        return None if tp == 1 else 0
    found = next((key for key in _CUT_DIMS if name.endswith(f".{key}")), None)
    if tp == 1 or found is None:
        return None
    is_whole = found in _KEYS and config.num_kv_heads % tp > 0
    return None if is_whole else _CUT_DIMS[found]


def tensor_spec(stage_mesh: ProcessMesh, dim: int, shape: Sequence[int], tp: int) -> Spec:
    """Where a parameter lies of which `tp` neighbours share out a dim.

    Args:
        stage_mesh: the ranks that hold it, those of a pipeline stage or of several.
        shape: of all of it; what does not divide, the vocabulary, is cut as `VocabularyShare` does.
    """
    mesh = ProcessMesh((stage_mesh.size // tp, tp), ("copies", TENSOR_AXIS), ranks=stage_mesh.ranks)
    parts = PositionCut(rank=0, size=tp).lengths(shape[dim])
    sizes = {TENSOR_AXIS: parts} if len(set(parts)) > 1 else None
    return Spec.from_axes(mesh, {TENSOR_AXIS: DimShard(dim)}, sizes=sizes)


def expert_spec(stage_mesh: ProcessMesh, parts: Sequence[int] | None, etp: int) -> Spec:
    """Where experts lie: [E, 2, H, d] of gate and up, [E, d, H] of down.

    Args:
        stage_mesh: as above, with the axis "ep".
        parts: experts of each rank along ep; None: equal ones.
    """
    sizes = None if parts is None else {"ep": parts}
    if etp == 1:
        return Spec.from_axes(stage_mesh, {"ep": DimShard(0)}, sizes=sizes)
    ep = stage_mesh.axis_size("ep")
    shape = (stage_mesh.size // (ep * etp), ep, etp)
    mesh = ProcessMesh(shape, ("copies", "ep", EXPERT_AXIS), ranks=stage_mesh.ranks)
    return Spec.from_axes(mesh, {"ep": DimShard(0), EXPERT_AXIS: DimShard(2)}, sizes=sizes)
