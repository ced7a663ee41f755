"""Call sites: the user's line, never one of this package."""

import threading

import pytest

import comm_collectives as cc
from comm_collectives.call.signature.callsite import CallSite, current_site, use_site


def test_site_is_the_line_of_the_caller() -> None:
    first = current_site()
    second = current_site()
    assert first.text.startswith("signature/test_callsite.py:")
    assert int(second.text.split(":")[1]) == int(first.text.split(":")[1]) + 1
    assert first.word != second.word


def test_same_line_is_the_same_site() -> None:
    assert len({current_site() for _ in range(3)}) == 1


def test_name_replaces_the_line_inside_its_block_and_thread_only() -> None:
    seen = []
    with cc.call_site("loss"):
        assert current_site().text == "loss"
        thread = threading.Thread(target=lambda: seen.append(current_site().text))
        thread.start()
        thread.join()
    assert len(seen) == 1 and seen != ["loss"]
    assert current_site().text != "loss"


def test_site_of_another_thread_can_be_used() -> None:
    site = CallSite("train.py:3", 7)
    with use_site(site):
        assert current_site() is site


def test_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="name is empty"), cc.call_site(""):
        pass


def test_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="name=7 is a int; give a str"), cc.call_site(7):  # type: ignore[arg-type]
        pass


def test_equal_code_in_two_files_is_two_sites() -> None:
    """Python's code objects are equal if all but the name of their file is."""
    source = "def where():\n    return current_site()\n"
    sites = []
    for file in ("job/first.py", "job/second.py"):
        names = {"current_site": current_site}
        exec(compile(source, file, "exec"), names)
        sites.append(names["where"]())
    assert [site.text for site in sites] == ["job/first.py:2", "job/second.py:2"]
