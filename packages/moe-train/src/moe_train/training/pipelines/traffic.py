"""How many bytes ranks send each other in a step, and in a change of the layout; pure.

Rows of tokens are those of comm-collectives' plan for even routing, activations those of the
schedule's transfers, gradients and changes of the layout those of mesh-spmd's plans. Headers,
sizes, what calls compare and the three numbers of a token's softmax are not counted.

    for traffic in step_traffic(config, model):
        print(traffic.kind, traffic.busiest_bytes, traffic.total_bytes)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate

from comm_collectives.planning import Payload, Workload, plan_dispatch, topology_preset
from mesh_spmd import ProcessMesh, Spec, TensorSpec, plan_reshard
from moe_pipeline.schedules import Kind
from moe_train.config import Config
from moe_train.layout import chosen_names, parameter_layouts
from moe_train.model import EMBEDDING, DecoderConfig, DecoderStage
from moe_train.model.parallel import PositionCut
from moe_train.parallel import AXES, cut_of, expert_mesh, make_mesh
from moe_train.training.experts import expert_parts
from moe_train.training.pipelines.pipeline import layers_of_stages, unmeasured_schedule

_STAGE = ("dp", "ep", "etp")  # the axes of experts on the ranks of a stage
_POSITION_BYTES = torch.int64.itemsize  # of each token, beside its activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one kind: what the busiest rank sends, and all ranks together.

    `unknown`: why there are no numbers; "" where there are.
    """

    kind: str
    busiest_bytes: int = 0
    total_bytes: int = 0
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    config: Config
    model: DecoderConfig
    mesh: ProcessMesh

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.config.train.dtype)
        return found

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.config.data.sequence_length

    @property
    def rows(self) -> int:
        """Samples of a rank, in a microbatch."""
        train, parallel = self.config.train, self.config.parallel
        ranks = train.gradient_accumulation_steps * parallel.num_sample_ranks
        return train.global_batch_size // ranks

    @property
    def cuts(self) -> list[PositionCut]:
        """Of the ranks that share a sample."""
        parallel = self.config.parallel
        return [cut_of(parallel, rank) for rank in range(parallel.cp * parallel.tp)]

    @property
    def tokens(self) -> list[int]:
        """Of each of these ranks, in a microbatch."""
        return [self.rows * cut.lengths(self.length)[cut.rank] for cut in self.cuts]

    @property
    def gradient_dtype(self) -> torch.dtype:
        train = self.config.train
        if train.grad_reduce_dtype is not None:
            asked: torch.dtype = getattr(torch, train.grad_reduce_dtype)
            return asked
        return torch.float32 if train.master_weights else self.dtype

    def stage_of_layer(self) -> dict[int, int]:
        """The pipeline rank of each layer."""
        parallel, layers = self.config.parallel, layers_of_stages(self.config, self.model)
        rank_of = {s: rank for rank in range(parallel.pp) for s in parallel.stages_of(rank)}
        found = {layer: rank_of[s] for s, held in enumerate(layers) for layer in held}
        return found | dict.fromkeys(self.model.mtp_layers, rank_of[len(layers) - 1])


def step_traffic(config: Config, model: DecoderConfig) -> list[Traffic]:
    """What the ranks of a job send in a step, by kind, and then in each change of its layout."""
    job = _Job(config=config, model=model, mesh=make_mesh(config.parallel))
    found = [_dispatch(job), _pipeline(job), _gradients(job)]
    if config.parallel.cp > 1:
        found.append(_attention(job))
    if config.parallel.tp > 1:
        found.append(_tensor(job))
    if config.parallel.etp > 1:
        found.append(_experts(job))
    return [*found, *_relayouts(job)]


def traffic_table(config: Config, model: DecoderConfig) -> list[str]:
    """The same in lines for people."""
    lines = [f"{'MiB sent':<26}{'busiest rank':>14}{'all ranks':>14}"]
    for traffic in step_traffic(config, model):
        busiest, total = traffic.busiest_bytes / 2**20, traffic.total_bytes / 2**20
        told = f"{busiest:>14.2f}{total:>14.2f}" if not traffic.unknown else f"  {traffic.unknown}"
        each = "" if traffic.kind.startswith("relayout") else ", a step"
        lines.append(f"{traffic.kind + each:<26}{told}")
    return lines


def _dispatch(job: _Job) -> Traffic:
    """Rows to the experts and back, in forward and backward."""
    kind, parallel, moe = "dispatch", job.config.parallel, job.config.moe
    if parallel.ep == 1:
        return Traffic(kind=kind)
    if parallel.expert_parts or moe.dispatch_backend != "torch":
        why = "uneven experts" if parallel.expert_parts else "DeepEP's own"
        return Traffic(kind=kind, unknown=f"not planned for {why}")
    if len(set(job.tokens)) > 1:
        return Traffic(kind=kind, unknown="not planned for samples that ranks share unevenly")
    if job.config.train.recompute in ("layers", "selective"):
        return Traffic(kind=kind, unknown="not planned for recomputed dispatches")
    node = moe.dispatch_ranks_per_node if moe.dispatch_route == "hierarchical" else None
    per_node = parallel.ep if node is None else node
    topology = topology_preset("h800-deepep", nodes=parallel.ep // per_node, gpus_per_node=per_node)
    workload = Workload(
        num_experts=job.model.num_experts,
        topk=job.model.moe.num_experts_per_tok,
        hidden_size=job.model.moe.moe_latent_size or job.model.hidden_size,
        tokens_per_rank=job.tokens[0],
        dtype=job.config.train.dtype,
    )
    payload: Payload = (
        "full" if moe.dispatch_payload == "full" else "float8_e4m3"
    )  # int8 has as many bytes
    plan = plan_dispatch(workload, topology, payloads=[payload])
    routes = {variant.route: variant for variant in plan.variants}
    chosen = routes.get(moe.dispatch_route, routes["dedup"])  # hierarchical on one node is that
    each = sum(m.total("intra_bytes") + m.total("inter_bytes") for m in chosen.movements)
    sparse = [r for layer, r in job.stage_of_layer().items() if job.model.is_sparse(layer)]
    count = job.config.train.gradient_accumulation_steps
    most = max((sparse.count(rank) for rank in set(sparse)), default=0)
    ranks = parallel.dp * parallel.ep
    return Traffic(
        kind=kind, busiest_bytes=most * count * each, total_bytes=len(sparse) * count * each * ranks
    )


def _pipeline(job: _Job) -> Traffic:
    """Activations and their gradients between stages."""
    if job.config.parallel.pp == 1:
        return Traffic(kind="pipeline")
    rows, sent = unmeasured_schedule(job.config).ranks, []
    for tokens in job.tokens:
        activation = tokens * job.model.hidden_size * job.dtype.itemsize
        sizes = {
            Kind.SEND_FORWARD: activation + job.rows * job.length * _POSITION_BYTES,
            Kind.SEND_BACKWARD: activation,
        }
        sent += [sum(sizes.get(action.kind, 0) for action in row) for row in rows]
    ranks = job.config.parallel.num_sample_ranks
    return Traffic(kind="pipeline", busiest_bytes=max(sent), total_bytes=sum(sent) * ranks)


def _attention(job: _Job) -> Traffic:
    """Heads for positions and back, among the ranks that share samples."""
    config, model = job.config, job.model
    forwards = 2 if config.train.recompute in ("layers", "selective") else 1
    layers = list(job.stage_of_layer().values())
    count = config.train.gradient_accumulation_steps * job.rows
    heads, tp = model.num_attention_heads // config.parallel.tp, config.parallel.tp
    if model.num_kv_heads % tp:
        why = "keys and values whose heads tp ranks do not share out"
        return Traffic(kind="attention", unknown=f"not planned for {why}")
    attention = model.attention.of_share(tp)
    item, wide = job.dtype.itemsize, torch.promote_types(job.dtype, torch.float32).itemsize
    each = []
    for cut in (cut.outer for cut in job.cuts):
        if config.parallel.cp_attention == "ring":
            numbers = attention.ring_widths(heads).sent(cut, job.length)
        else:
            numbers = (*attention.widths(heads).sent(cut, job.length), 0)
        forward, backward, gradients = numbers
        each.append(count * (item * (forwards * forward + backward) + wide * gradients))
    return Traffic(
        kind="attention",
        busiest_bytes=max(layers.count(rank) for rank in set(layers)) * max(each),
        total_bytes=len(layers) * sum(each) * config.parallel.num_sample_ranks,
    )


def _tensor(job: _Job) -> Traffic:
    """Positions gathered for attention, MLPs, shared experts and the head; sums brought back."""
    config, model, tp = job.config, job.model, job.config.parallel.tp
    again = config.train.recompute in ("layers", "selective")
    count = config.train.gradient_accumulation_steps * job.rows * job.dtype.itemsize
    busiest, total, last = 0, 0, _last_rank(config)
    num_ahead = len(model.mtp_layers) if config.train.mtp_loss_coef else 0
    for cut in job.cuts:
        lengths = cut.lengths(job.length)
        own, others = lengths[cut.rank] * (tp - 1), sum(lengths) - lengths[cut.rank]
        sent = dict.fromkeys(range(config.parallel.pp), 0)
        for layer, rank in job.stage_of_layer().items():
            out = model.hidden_size
            has_width = not model.is_sparse(layer) or model.moe.shared_expert is not None
            for into in (model.gathered_width, *((out,) if has_width else ())):
                sent[rank] += (1 + again) * (own * into + others * out) + others * into + own * out
        # Looked up and brought back, and gathered for the head: the same bytes as each other.
        sent[0] += (own + others) * model.hidden_size
        sent[last] += (own + others) * model.hidden_size * (1 + 2 * num_ahead)
        busiest = max(busiest, *sent.values())
        total += sum(sent.values())
    ranks = config.parallel.num_sample_ranks
    return Traffic(kind="tensor", busiest_bytes=busiest * count, total_bytes=total * count * ranks)


def _experts(job: _Job) -> Traffic:
    """Rows and their weights gathered by ranks that share experts; sums brought back."""
    config, moe, parallel = job.config, job.model.moe, job.config.parallel
    parts, mesh = expert_parts(config, job.model), expert_mesh(parallel).submesh(*_STAGE, of=0)
    forwards = 1 + (config.train.recompute in ("layers", "selective"))
    each = (moe.moe_latent_size or job.model.hidden_size) * job.dtype.itemsize
    weight = torch.float32.itemsize
    count = config.train.gradient_accumulation_steps * moe.num_experts_per_tok
    sent = dict.fromkeys(job.mesh.ranks, 0)
    for layer, stage in job.stage_of_layer().items():
        if not job.model.is_sparse(layer):
            continue
        held = parts.get(layer, (1,) * parallel.ep)
        rows: dict[int, int] = {}
        for group in mesh.groups("ep"):
            routed = count * sum(job.tokens[rank % len(job.tokens)] for rank in group)
            rows |= {r: routed * part // sum(held) for r, part in zip(group, held, strict=True)}
        for group in mesh.groups("etp"):
            for rank in group:
                own, others = (
                    rows[rank] * (len(group) - 1),
                    sum(rows[r] for r in group if r != rank),
                )
                found = (forwards + 1) * (own + others) * each
                sent[stage * mesh.size + rank] += found + (forwards * own + others) * weight
    return _summed("experts", sent)


def _gradients(job: _Job) -> Traffic:
    """Sums over the ranks that hold a parameter, along each axis on which it is not cut."""
    sent = dict.fromkeys(job.mesh.ranks, 0)
    trained = _trained(job)
    for held in _specs(job, job.gradient_dtype):
        due = [_due(spec) for name, spec in held.items() if name in trained]
        wanted = [spec for name, spec in held.items() if name in trained]
        moving = [pair for pair in zip(due, wanted, strict=True) if pair[0].partials]
        if moving:
            plan = plan_reshard([source for source, _ in moving], [t for _, t in moving])
            _count(sent, plan.sent_bytes)
    return _summed("gradients", sent)


def _due(wanted: TensorSpec) -> TensorSpec:
    """The same tensor as a backward leaves it: each replica has a part of the sum."""
    spec = wanted.boxes
    placements = tuple(
        Partial() if isinstance(placement, Replicate) and size > 1 else placement
        for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
    )
    due = Spec(spec.mesh, placements, spec.order, spec.sizes)
    return TensorSpec(wanted.shape, wanted.dtype, due)


def _relayouts(job: _Job) -> Iterator[Traffic]:
    """Weights, moments and master weights that change their ranks."""
    asked, before = job.config.parallel, job
    step = asked.next_change(0)
    while step is not None:
        kind = f"relayout after step {step}"
        if asked.is_by_load(step) or job.config.optimizer.name == "muon":
            yield Traffic(
                kind=kind, unknown="it depends on the load of experts, or on Muon's moments"
            )
            return
        config = replace(job.config, parallel=asked.at_step(step))
        after = _Job(config=config, model=job.model, mesh=make_mesh(config.parallel))
        sent = dict.fromkeys(job.mesh.ranks, 0)
        for dtype, names in _state(job):
            lies: dict[str, TensorSpec] = {}
            for held in reversed(_specs(before, dtype)):
                lies |= held
            wanted = [
                (lies[n], spec)
                for held in _specs(after, dtype)
                for n, spec in held.items()
                if n in names
            ]
            plan = plan_reshard([source for source, _ in wanted], [spec for _, spec in wanted])
            _count(sent, plan.sent_bytes)
        yield _summed(kind, sent)
        before, step = after, asked.next_change(step)


def _state(job: _Job) -> Iterator[tuple[torch.dtype, set[str]]]:
    """What is kept between steps: a format of numbers, and of which parameters."""
    yield job.dtype, _names(job)
    exact = getattr(torch, job.config.train.state_dtype)
    for _ in range(2 + job.config.train.master_weights):
        yield exact, _trained(job)


def _specs(job: _Job, dtype: torch.dtype) -> list[dict[str, TensorSpec]]:
    """By parameter where it lies on the ranks of each pipeline stage that holds some.

    An embedding that two stages share is one of the first, whose mesh is then that of both.
    """
    config, model = job.config, job.model
    of_layer, tp, etp = job.stage_of_layer(), config.parallel.tp, config.parallel.etp
    decoder = DecoderStage.without_memory(model)
    parts, last = expert_parts(config, model), _last_rank(config)
    found = []
    for rank in range(config.parallel.pp):
        mesh = job.mesh.submesh("dp", "ep", of={"pp": rank})
        layouts = parameter_layouts(decoder, model, mesh, parts, tp, etp, is_whole=True)
        names = [n for n in _names(job) if _rank_of(n, of_layer, last) == rank]
        found.append(
            {n: TensorSpec(layouts[n].global_shape, dtype, layouts[n].spec) for n in names}
        )
    if last and model.shares_embedding(config.train.mtp_loss_coef):
        ranks = [r for r in job.mesh.ranks if job.mesh.coordinate(r)["pp"] in (0, last)]
        both = ProcessMesh((2, config.parallel.dp, config.parallel.ep), AXES, ranks=ranks)
        shared = parameter_layouts(decoder, model, both, parts, tp, etp, is_whole=True)[EMBEDDING]
        found[0][EMBEDDING] = TensorSpec(shared.global_shape, dtype, shared.spec)
    return found


def _last_rank(config: Config) -> int:
    """The pipeline rank that has the last stage."""
    parallel = config.parallel
    return next(r for r in range(parallel.pp) if parallel.num_stages - 1 in parallel.stages_of(r))


def _rank_of(name: str, of_layer: Mapping[int, int], last: int) -> int:
    """The pipeline rank of a parameter."""
    if ".layers." in name:
        return of_layer[int(name.partition(".layers.")[2].partition(".")[0])]
    return 0 if name == EMBEDDING else last


def _names(job: _Job) -> set[str]:
    return {name for name, _ in DecoderStage.without_memory(job.model).named_parameters()}


def _trained(job: _Job) -> set[str]:
    asked = job.config.train.trainable
    names = _names(job)
    return names & chosen_names("train.trainable", asked, job.model) if asked else names


def _count(total: dict[int, int], sent: Mapping[int, int]) -> None:
    for rank, count in sent.items():
        total[rank] += count


def _summed(kind: str, sent: Mapping[int, int]) -> Traffic:
    return Traffic(kind=kind, busiest_bytes=max(sent.values()), total_bytes=sum(sent.values()))
