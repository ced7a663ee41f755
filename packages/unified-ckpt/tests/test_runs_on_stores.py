"""The checkpoints of a run in a store: rotation, the newest one, resume, and what may go wrong.

Against a folder named by `file://`, fsspec's local files, and a server that speaks S3, all with
default settings; what a store may do to a run is played by stores that lose, hide or refuse.
"""

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from unified_ckpt import (
    CheckpointManager,
    LoadOptions,
    ManagerOptions,
    Shard,
    async_save,
    diff_checkpoints,
    get_last_checkpoint,
    load,
    rotate,
    save,
)
from unified_ckpt.background import AsyncSaver
from unified_ckpt.errors import (
    DamagedCheckpointWarning,
    ReplacedCheckpointError,
    SaveError,
    StoreError,
)
from unified_ckpt.files import Buffer
from unified_ckpt.files.storage import Fetched, LocalStore, Location, as_target
from unified_ckpt.folders import check_steps_free, numbered_checkpoints
from unified_ckpt.folders.in_store import remove_stored
from unified_ckpt.plans.checkpoint import is_stored
from unified_ckpt.saving.commit import Draft

KINDS = ["file", "fsspec", "s3"]
QUIET = ManagerOptions(signals=())


def shards(value: float, rank: int = 0, world_size: int = 1) -> dict[str, list[Shard]]:
    tensor = torch.full((3,), float(value))
    return {"model": [Shard.of("w", tensor, global_shape=(3 * world_size,), offset=(3 * rank,))]}


def fill(place: object) -> float:
    tensor = torch.zeros(3)
    load([Shard.of("w", tensor, global_shape=(3,), offset=(0,))], checkpoint_id=place)
    return float(tensor[0])


def there(folder: Location) -> list[str]:
    """The names below a folder that are checkpoints or what is left of some."""
    left: dict[str, list[str]] = {}
    for key in folder.store.keys(folder.key):
        name, _, rest = key[len(folder.key) + 1 :].partition("/")
        left.setdefault(name, []).append(rest)
    left.pop("unified_ckpt_run.json", None)
    return sorted(n for n, files in left.items() if is_stored(folder / n) or len(files) > 1)


def place_in(path: Path) -> Location:
    return Location(store=LocalStore(path), key="run")


@pytest.fixture(params=KINDS)
def on_ranks(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Callable[..., object]], list[object]]:
    """Run `work(rank, folder)` on two ranks; `folder` is the URL of a run."""
    place = request.getfixturevalue("bucket") if request.param == "s3" else f"file://{tmp_path}"
    if request.param == "fsspec":
        place = f"fsspec+{place}"
    return lambda work: run_ranks(lambda rank, _: work(rank, f"{place}/run"), 2, timeout_s=120)


def test_a_run_lives_in_a_store(on_ranks: Callable[..., list[object]]) -> None:
    options = ManagerOptions(save_total_limit=2, best_metric="loss", signals=())

    def work(rank: int, url: str) -> None:
        def read(place: Location) -> tuple[float, float]:
            wants = shards(0, rank, 2)["model"]
            load(wants, checkpoint_id=place)
            return float(wants[0].tensor[0]), float(wants[0].tensor[-1])

        with CheckpointManager(url, options) as manager:
            assert manager.resume(read) is None
            for step, loss in ((1, 3.0), (2, 0.5), (3, 2.0), (4, math.nan), (5, 2.5)):
                manager.save(shards(step + rank, rank, 2), step, metrics={"loss": loss})
            dist.barrier()
            assert there(manager.folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
            assert manager.best().name == "checkpoint-2"
        assert str(get_last_checkpoint(url)) == f"{url}/checkpoint-5"
        dist.barrier()
        with CheckpointManager(url, options) as manager:
            place, values = manager.resume(read)
            assert (place.name, values) == ("checkpoint-5", (5.0 + rank, 5.0 + rank))
        dist.barrier()
        if rank == 0:
            name = min(n for n in place.store.keys(place.key) if n.endswith(".safetensors"))
            raw = bytearray(place.store.read(name, 0, place.store.size(name)))
            raw[-1] ^= 1
            place.store.upload(name, [raw], num_bytes=len(raw))
        dist.barrier()
        with (
            CheckpointManager(url, options) as manager,
            pytest.warns(DamagedCheckpointWarning, match="checkpoint-5 is damaged"),
        ):
            assert manager.resume(read)[0].name == "checkpoint-4"
            dist.barrier()

    on_ranks(work)


def test_only_the_manager_of_a_folder_saves_there(on_ranks: Callable[..., list[object]]) -> None:
    def work(rank: int, url: str) -> None:
        alone = [dist.new_group([r]) for r in range(2)][rank]
        quick = ManagerOptions(signals=(), lease_s=0.9)
        if rank == 0:
            with CheckpointManager(url, quick, group=alone) as manager:
                manager.save(shards(1), 1)
                dist.barrier()
                dist.barrier()
        else:
            dist.barrier()
            with pytest.raises(SaveError, match="another job manages"):
                CheckpointManager(url, group=alone)
            dist.barrier()
        dist.barrier()
        if rank == 1:
            with CheckpointManager(url, group=alone) as manager:
                assert manager.resume(fill)[1] == 1.0

    on_ranks(work)


def test_what_a_killed_save_or_removal_left_goes_when_a_job_begins(tmp_path: Path) -> None:
    folder = place_in(tmp_path)
    save(shards(1), checkpoint_id=folder / "checkpoint-1")
    draft = Draft.make(folder / "checkpoint-2")  # and is killed
    where = draft.folder / "model.safetensors"
    where.store.upload(where.key, [b"half"], num_bytes=4)
    save(shards(3), checkpoint_id=folder / "checkpoint-3")
    folder.store.delete([(folder / "checkpoint-3" / "manifest.json").key])  # and is killed
    assert get_last_checkpoint(folder).name == "checkpoint-1"
    check_steps_free(folder, range(10))
    with CheckpointManager(folder, QUIET):
        assert there(folder) == ["checkpoint-1"]
    remove_stored(folder / "checkpoint-3")  # once more is no error
    notes = folder / "checkpoint-4" / "notes.txt"
    folder.store.upload(notes.key, [b"mine"], num_bytes=4)
    with pytest.raises(ValueError, match=r"checkpoint-4 is no .*step 4; move it aw"):
        check_steps_free(folder, range(10))
    with CheckpointManager(folder, QUIET):
        assert folder.store.fetch(notes.key).data == b"mine"


class OldLists(LocalStore):
    """Lists what was there when it was made, and nothing that came since."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.children_then = {"run": super().children("run")}
        self.keys_then = super().keys("run")

    def children(self, prefix: str) -> Sequence[str]:
        return self.children_then.get(prefix, [])

    def keys(self, prefix: str) -> Sequence[str]:
        return [key for key in self.keys_then if key.startswith(f"{prefix}/")]


def test_no_list_however_old_hides_a_checkpoint_or_shows_one_that_is_gone(tmp_path: Path) -> None:
    now = place_in(tmp_path)
    options = ManagerOptions(save_total_limit=2, signals=())
    with CheckpointManager(now, options) as manager:
        manager.save(shards(1), 1)
        manager.save(shards(2), 2)
    then = Location(store=OldLists(tmp_path), key="run")
    with CheckpointManager(then, options) as manager:
        for step in (3, 4, 5):
            manager.save(shards(step), step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert manager.resume(fill) == (then / "checkpoint-5", 5.0)
            assert get_last_checkpoint(then).name == "checkpoint-5"
    assert there(now) == ["checkpoint-4", "checkpoint-5"], "rotation needs no list"
    assert not [key for key in now.store.keys("run") if "checkpoint-3" in key]


class Silent(LocalStore):
    """Does not answer for what has a name in it."""

    name = "checkpoint-2/"

    def fetch(self, key: str) -> Fetched | None:
        self._answer(key)
        return super().fetch(key)

    def size(self, key: str) -> int | None:
        self._answer(key)
        return super().size(key)

    def _answer(self, key: str) -> None:
        if self.name in key:
            raise TimeoutError("no answer")


def test_a_store_that_does_not_answer_is_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    folder = place_in(tmp_path)
    with CheckpointManager(folder, QUIET) as manager:
        for step in (1, 2):
            manager.save(shards(step), step, metrics={"loss": step})
    silent = Location(store=Silent(tmp_path), key="run")
    with pytest.raises(StoreError, match=r"checkpoint-2/manifest.json: the store cannot be used"):
        get_last_checkpoint(silent)
    with pytest.raises(StoreError, match="no answer"):
        rotate(silent, 1)
    best = ManagerOptions(save_total_limit=1, best_metric="loss", best_mode="max", signals=())
    silent.store.name = "checkpoint-2/data"
    with CheckpointManager(silent, best) as manager:
        with pytest.raises(SaveError, match=r"'rotate': StoreError: .*checkpoint-2.*no answer"):
            manager.save(shards(3), 3, metrics={"loss": 0.0})
        silent.store.name = "checkpoint-3/"
        with pytest.raises(SaveError, match="no answer"):
            manager.resume(fill)
    assert there(folder) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"], "the best one stays"


class LosesOne(LocalStore):
    """Does not answer one of all requests, the one of a number."""

    number = -1

    def fetch(self, key: str) -> Fetched | None:
        self._count()
        return super().fetch(key)

    def size(self, key: str) -> int | None:
        self._count()
        return super().size(key)

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        self._count()
        return super().read(key, start, num_bytes)

    def _count(self) -> None:
        self.number -= 1
        if self.number == -1:
            raise ConnectionError("no answer")


def test_whichever_request_is_lost_no_older_checkpoint_is_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        save(shards(step), checkpoint_id=place_in(tmp_path) / f"checkpoint-{step}")
    lossy = Location(store=LosesOne(tmp_path), key="run")
    failed = 0
    for number in range(20):
        lossy.store.number = number
        try:
            assert get_last_checkpoint(lossy, verify="full") == lossy / "checkpoint-2", number
        except StoreError:
            failed += 1
    assert failed > 5


def test_whichever_request_is_lost_master_weights_are_not_made_of_the_model(tmp_path: Path) -> None:
    masters = {"w": torch.full((4,), 1.0 + 2**-20)}  # more than bf16 could say
    state = {"model": {"w": torch.ones(4).bfloat16()}, "master_weights": masters}
    save(state, checkpoint_id=place_in(tmp_path) / "checkpoint-1")
    lossy = Location(store=LosesOne(tmp_path), key="run/checkpoint-1")
    failed = 0
    for number in range(20):
        filled = {"w": torch.zeros(4)}
        lossy.store.number = number
        try:
            options = LoadOptions(master_weight_compatible=True)
            load({"master_weights": filled}, checkpoint_id=lossy, options=options)
        except StoreError:
            failed += 1
        else:
            assert torch.equal(filled["w"], masters["w"]), number
    assert 3 < failed < 20


def test_whichever_request_is_lost_an_optimizer_gets_its_states(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, checkpoint_id=place_in(tmp_path) / "checkpoint-1")
    lossy = Location(store=LosesOne(tmp_path), key="run/checkpoint-1")
    failed = 0
    for number in range(20):
        fresh = torch.optim.AdamW(torch.nn.Linear(4, 3).named_parameters())
        lossy.store.number = number
        try:
            load({"optimizer": fresh}, checkpoint_id=lossy)
        except StoreError:
            failed += 1
        else:
            assert len(fresh.state) == 2, number
    assert 3 < failed < 20


def test_a_load_of_what_is_removed_meanwhile_says_so(tmp_path: Path) -> None:
    folder = place_in(tmp_path)
    for step in (1, 2):
        save(shards(step), checkpoint_id=folder / f"checkpoint-{step}")

    class Slow(LocalStore):
        def read(self, key: str, start: int, num_bytes: int) -> memoryview:
            rotate(folder, 1)
            return super().read(key, start, num_bytes)

    with pytest.raises(ReplacedCheckpointError, match="was removed while it was read"):
        fill(Location(store=Slow(tmp_path), key="run/checkpoint-1"))
    assert [place.name for place in numbered_checkpoints(folder)] == ["checkpoint-2"]


def test_resume_takes_another_one_if_the_newest_is_removed_while_it_is_loaded(
    tmp_path: Path,
) -> None:
    folder = place_in(tmp_path)

    def load_slowly(place: Location) -> float:
        if place.name == "checkpoint-2":
            remove_stored(place)
        return fill(place)

    with CheckpointManager(folder, QUIET) as manager:
        for step in (1, 2):
            manager.save(shards(step), step)
        assert manager.resume(load_slowly) == (folder / "checkpoint-1", 1.0)


def test_saves_in_the_background_are_begun_noted_and_rotated(
    tmp_path: Path, saver: AsyncSaver
) -> None:
    url = f"file://{tmp_path}/run"
    with CheckpointManager(url, ManagerOptions(save_total_limit=1, signals=())) as manager:
        for step in (1, 2):
            target = manager.begin(step)
            async_save(shards(step), checkpoint_id=target, saver=saver).upload_completion.result()
            manager.committed(step)
        assert there(manager.folder) == ["checkpoint-2"]
        assert manager.resume(fill)[1] == 2.0


def test_a_thread_that_renews_ends_with_the_manager(tmp_path: Path) -> None:
    with CheckpointManager(place_in(tmp_path), QUIET):
        assert "unified-ckpt-lease" in {thread.name for thread in threading.enumerate()}
    assert "unified-ckpt-lease" not in {thread.name for thread in threading.enumerate()}


def test_checkpoints_in_stores_are_compared_and_inspected(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a"
    for place, value in ((url, 1.0), (tmp_path / "b", 1.0), (tmp_path / "c", 2.0)):
        save(shards(value), checkpoint_id=place)
    assert list(diff_checkpoints(url, tmp_path / "b")) == []
    assert [each.name for each in diff_checkpoints(url, tmp_path / "c")] == ["w"]
    assert as_target("x", url).name == "a"


class _Busy(LocalStore):
    """A folder in which a job does something else before the first look at a manifest."""

    def __init__(self, root: Path, *, before: Callable[[], object], number: int = 0) -> None:
        super().__init__(root)
        self._before, self._number, self._looks = before, number, 0

    def _look(self, key: str) -> None:
        if key.endswith("manifest.json"):
            self._looks += 1
            if self._looks == self._number + 1:
                self._before()

    def size(self, key: str) -> int | None:
        self._look(key)
        return super().size(key)

    def fetch(self, key: str) -> Fetched | None:
        self._look(key)
        return super().fetch(key)


def test_a_run_in_which_all_that_was_listed_is_rotated_away_is_listed_again(
    tmp_path: Path,
) -> None:
    """Who looks is slow: of what it has listed, nothing is left when it asks for it."""
    place = place_in(tmp_path)
    options = ManagerOptions(save_total_limit=1, signals=())
    with CheckpointManager(place, options) as manager:
        manager.save(shards(1), 1)
        manager.begin(2)  # is listed, and not there yet

        def go_on() -> None:
            for step in (2, 3):
                manager.save(shards(step), step)

        slow = Location(store=_Busy(tmp_path, before=go_on, number=1), key=place.key)
        assert str(get_last_checkpoint(slow)) == str(place / "checkpoint-3")
        assert get_last_checkpoint(place_in(tmp_path / "nothing")) is None


def test_what_the_first_rank_has_checked_is_what_is_loaded(tmp_path: Path) -> None:
    """Between the check of all bytes and the load, another checkpoint gets the name."""
    place = place_in(tmp_path)
    with CheckpointManager(place, QUIET) as manager:
        for step in (1, 2):
            manager.save(shards(step), step)

    def replace() -> None:
        save(shards(7), checkpoint_id=place / "checkpoint-2")
        (damaged,) = (tmp_path / "run" / "checkpoint-2").glob("data-*/model.safetensors")
        raw = bytearray(damaged.read_bytes())
        raw[-1] ^= 1
        damaged.write_bytes(raw)

    # Looks at manifests: is it there, the check, is it still the same; then the load.
    for number in range(3, 5):
        busy = Location(store=_Busy(tmp_path, before=replace, number=number), key=place.key)
        with (
            CheckpointManager(busy, QUIET) as manager,
            pytest.warns(DamagedCheckpointWarning, match="checkpoint-2 is passed over"),
        ):
            found = manager.resume(lambda folder: folder.name, verify="full")
        assert found is not None and found[1] == "checkpoint-1"
        save(shards(2), checkpoint_id=place / "checkpoint-2")
