"""A save that returns once the state is copied; a separate process writes, checks and commits it.

Crash safety is that of `save`, which the saver process calls.

    response = async_save(state_dict, checkpoint_id="run/checkpoint-10", saver=saver)
    ...  # train on
    report = response.upload_completion.result()
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from unified_ckpt.background.pending_saves import UploadFuture
from unified_ckpt.background.saver import AsyncSaver
from unified_ckpt.errors import SaveError, check_type
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry.tensors import collector_paused
from unified_ckpt.options import SaveOptions
from unified_ckpt.state import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSaveResponse:
    """The two moments of a save in the background, as torch's distributed checkpoint has them.

    Attributes:
        staging_completion: the state has been copied. CPU memory is when `async_save` returns; for
            tensors of a CUDA device, the stream that was current then waits before it goes on.
        upload_completion: the checkpoint is committed, or why it is not. Its result is the report.
    """

    staging_completion: "Future[None]"
    upload_completion: UploadFuture


@collector_paused()
def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: Path | str | Location,
    saver: AsyncSaver,
    files: Mapping[str, bytes] | None = None,
    rank_files: Mapping[str, bytes] | None = None,
    options: SaveOptions | None = None,
    loss: float | None = None,
) -> AsyncSaveResponse:
    """Copy the state and let the saver process write it; every rank of the saver's group calls it.

    Nothing in the call is collective: a rank whose call raises makes this one checkpoint fail on
    all ranks, in their `upload_completion`. When all staging buffers are in use, the call waits.

    Args:
        state_dict: as in `save`. Parts of ready-made `Shard`s cost the least to take apart.
        checkpoint_id: as in `save`. With `AsyncSaverConfig.tier` it ends in `checkpoint-N`, and one
            in the folder of the tier (`/dev/shm/my-run/checkpoint-20`) stays on the nodes.
        saver: the saver of this rank; `saver.prepare(state_dict)` before the first save makes that
            one as fast as the others.
        files, rank_files, options: as in `save`; the saver process compresses moments.
        loss: of this step, the same on all ranks; for a moving average (see `EmaConfig`).

    Raises:
        SaveError: the saver process had died, an earlier save had failed unseen, or no buffer
            became free within `backpressure_timeout_s`.
        CheckpointTypeError: the state or the files hold something that cannot be saved.
    """
    check_type("saver", saver, AsyncSaver)
    pending, tensors = saver.reserve(
        state_dict,
        checkpoint_id=checkpoint_id,
        files=files,
        rank_files=rank_files,
        options=options,
        loss=loss,
    )
    staged: Future[None] = Future()
    staged.set_running_or_notify_cancel()  # nothing takes a copy back

    def submit() -> None:
        staged.set_result(None)
        saver.submit(pending)

    def fail(error: SaveError) -> None:
        staged.set_exception(error)
        saver.abandon(pending, error)

    offloader = saver.offloader
    try:
        offloader.start(tensors, pending.buffer.views(pending.layout), pending.layout)
        saver.expect(pending)
        offloader.finish(submit, on_error=fail, timeout_s=saver.config.timeout_s)
    except BaseException as error:  # an open save would hold up all later ones
        saver.abandon(pending, error, still_copying=offloader.busy)
        raise
    return AsyncSaveResponse(staging_completion=staged, upload_completion=pending.upload_completion)
