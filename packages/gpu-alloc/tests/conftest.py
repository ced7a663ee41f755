from pathlib import Path

import pytest

from gpu_alloc.native import NativeAllocator, NativeUnavailableError, native_library

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other tests of the same process may have imported a torch of another CUDA version."""
    ignored = pytest.mark.filterwarnings("ignore::gpu_alloc.errors.CudaVersionWarning")
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(ignored)


@pytest.fixture(params=["python", "native"])
def each_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tests of a module once more, with the compiled core under the name of the other."""
    core: str = request.param
    if core == "native":
        try:
            native_library()
        except NativeUnavailableError as error:
            pytest.skip(f"no compiled core: {error}")
        monkeypatch.setattr(request.module, "TwoPoolAllocator", NativeAllocator)
    return core
