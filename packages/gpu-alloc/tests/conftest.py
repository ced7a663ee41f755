import pytest

from gpu_alloc.native import NativeAllocator, NativeUnavailableError, native_library


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
