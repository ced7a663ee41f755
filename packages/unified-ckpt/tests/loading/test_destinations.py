from pathlib import Path

import pytest
import torch
from torch import nn

from unified_ckpt import Shard, load, save
from unified_ckpt.errors import LoadError
from unified_ckpt.loading.destinations import check_destinations
from unified_ckpt.options import LoadOptions


def shards(**tensors: torch.Tensor) -> dict[str, list[Shard]]:
    return {
        "model": [
            Shard.of(key, t, global_shape=t.shape, offset=[0] * t.dim())
            for key, t in tensors.items()
        ]
    }


def test_tensors_between_each_other_share_nothing() -> None:
    wide, deep = torch.zeros(6, 8), torch.zeros(3, 4, 6)
    check_destinations(shards(a=wide[:, :3], b=wide[:, 3:5], c=wide[::2, 5:], d=wide[1::2, 5:]))
    check_destinations(shards(a=deep[..., ::2], b=deep[..., 1::2], c=torch.zeros(()), d=wide.t()))
    check_destinations(shards(a=wide.as_strided((3, 5), (1, 9)), b=wide[:0], c=wide[2:2]))
    check_destinations(shards(a=wide, b=wide, c=wide))  # tied


BUFFER = torch.zeros(40)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": BUFFER[:10], "b": BUFFER[9:20]},
        {"a": BUFFER, "c": torch.zeros(2), "b": BUFFER[39]},
        {"a": BUFFER.view(8, 5)[:, :3], "b": BUFFER.view(8, 5)[:, 2:]},
        {"a": BUFFER.view(8, 5)[:, :3], "b": BUFFER.view(5, 8)[1]},
        {"a": BUFFER.view(8, 5), "b": BUFFER.view(5, 8)},
        {"a": BUFFER[:8], "b": BUFFER[4:12].view(torch.float64)},
        {"a": BUFFER, "c": BUFFER[30:], "b": BUFFER[20:25]},
        {"b": BUFFER.as_strided((4, 4), (3, 1))},
        {"b": torch.zeros(1, 3).expand(2, 3)},
        {"b": torch.zeros(3, 1).expand(3, 2)},
    ],
)
def test_tensors_that_share_elements_are_refused_by_name(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"'[bc]': the destination .*shares"):
        check_destinations(shards(**tensors))


def test_overlapping_tensors_are_no_damage_and_stay_as_they_were(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(4), "b": torch.ones(4) * 2}}, checkpoint_id=tmp_path / "c")
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match="'b': the destination shares a part of its memory with"):
        load({"model": {"a": memory[:4], "b": memory[2:]}}, checkpoint_id=tmp_path / "c")
    assert not memory.any()


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("verify", [True, False])
def test_tied_weights_are_loaded_if_what_is_stored_of_them_is_equal(
    verify: bool, tmp_path: Path
) -> None:
    model, again = Tied(), Tied()
    save({"model": model}, checkpoint_id=tmp_path / "tied")
    report = load({"model": again}, checkpoint_id=tmp_path / "tied", verify=verify)
    assert torch.equal(again.head.weight, model.head.weight) and report.unused == ()
    save({"model": Tied(tied=False)}, checkpoint_id=tmp_path / "c")
    before = again.head.weight.clone()
    with pytest.raises(LoadError, match=r"'embedding.weight' and 'head.weight' are the same mem"):
        load({"model": again}, checkpoint_id=tmp_path / "c", verify=verify)
    assert torch.equal(again.head.weight, before)
    options = LoadOptions(ignored_keys=("head",))
    load({"model": again}, checkpoint_id=tmp_path / "c", verify=verify, options=options)
    assert not torch.equal(again.head.weight, before)


ODD = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.zeros(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(2)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(1)], layout=torch.jagged
    ),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "lazy": nn.parameter.UninitializedParameter,
    "lazy buffer": nn.parameter.UninitializedBuffer,
    "freed": lambda: freed(torch.zeros(2)),
}


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_tensors_without_plain_memory_are_refused_by_name_or_left_alone(
    name: str, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.zeros(2), "odd": ODD[name]()}}
    with pytest.raises((ValueError, TypeError), match=r"'odd': .*(tensor|shape)"):
        save(state, checkpoint_id=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    save({"model": {"w": torch.ones(2), "odd": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    with pytest.raises((ValueError, TypeError), match=r"'odd': .*(tensor|shape)"):
        load(state, checkpoint_id=tmp_path / "c")
    assert not state["model"]["w"].any()
    load(state, checkpoint_id=tmp_path / "c", options=LoadOptions(ignored_keys=("odd",)))
    assert bool(state["model"]["w"].all())
