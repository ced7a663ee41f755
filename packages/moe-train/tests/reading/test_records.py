from typing import Any

import pytest

from moe_train.reading.records import (
    Conversation,
    Preference,
    columns_of,
    conversation,
    embedding_pair,
    preference,
)

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes"}


def messages(*found: Any, **row: Any) -> list[dict[str, Any]]:
    return conversation({"messages": list(found), **row}, "messages", "p").messages


def test_messages_come_out_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": {"x": 1}}],
    }
    assert messages(
        USER, {**ANSWER, "weight": 0.0, "name": None}, {"role": "user", "content": parts}
    ) == [
        USER,
        {**ANSWER, "weight": 0},
        {"role": "user", "content": "ab"},
    ]
    assert messages(call) == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"x": 1}}]}
    ]


def test_sharegpt_rows_are_conversations() -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    found = conversation({"conversations": talk, "id": 3}, "messages", "p")
    assert found == Conversation(messages=[USER, ANSWER], tools=None)


def test_tools_may_be_text() -> None:
    row = {"messages": [USER], "tools": '[{"name": "f"}]'}
    assert conversation(row, "messages", "p").tools == [{"name": "f"}]
    assert conversation({**row, "tools": [{"name": "f", "x": None}]}, "messages", "p").tools == [
        {"name": "f"}
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mesages": []}, r"p: there is no field 'messages'; did you mean 'mesages'\?"),
        ({"messages": "Hi"}, r"p, messages holds 'Hi', expected a list of messages"),
        ({"messages": None}, r"holds None, expected a list"),
        ({"messages": ["Hi"]}, r"p, messages\[0\] holds 'Hi', expected {.role.: "),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: role is None, expected one of system"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, r"did you mean 'assistant'\?"),
        ({"messages": [USER, {"role": "user"}]}, r"messages\[1\]: content is None, expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"parts .* only"),
        (
            {"messages": [{**ANSWER, "weight": 0.5}]},
            r"weight is 0.5, expected 0 \(no target\) or 1",
        ),
        ({"messages": [USER], "tools": "{"}, r"p: tools is text that is not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, r"p: tools is {'a': 1}, expected a list"),
    ],
)
def test_a_bad_conversation_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversation(row, "messages", "p")


def test_preferences_are_texts_or_conversations() -> None:
    assert preference({"prompt": "q", "chosen": "a", "rejected": "b"}, "p") == Preference(
        prompt="q", chosen="a", rejected="b"
    )
    for prompt in ("Hi", [USER]):
        other = {**ANSWER, "content": "No"}
        found = preference({"prompt": prompt, "chosen": [ANSWER], "rejected": [other]}, "p")
        assert found.chosen == Conversation(messages=[USER, ANSWER], tools=None)
        assert found.rejected == Conversation(messages=[USER, other], tools=None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a"}, r"no field 'rejected'"),
        ({"chosen": "a", "rejected": "a"}, r"are the same; take the pair out"),
        ({"chosen": "a", "rejected": [ANSWER]}, r"must both be texts or both messages"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, r"prompt is 3, expected text"),
        ({"chosen": [ANSWER], "rejected": [{}]}, r"p, rejected\[0\]: role is None"),
    ],
)
def test_a_bad_preference_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference(row, "p")


def test_embedding_pairs_have_any_number_of_negatives() -> None:
    pair = embedding_pair({"anchor": "a", "positive": "b"}, "p")
    assert (pair.anchor, pair.positive, pair.negatives) == ("a", "b", ())
    row = {"anchor": "a", "positive": "b", "negative": "c", "negatives": ["d", "e"]}
    assert embedding_pair(row, "p").negatives == ("c", "d", "e")
    for wrong, message in (
        ({"anchor": "a"}, "no field 'positive'"),
        ({"anchor": "", "positive": "b"}, "anchor is '', expected a text that is not empty"),
        ({**row, "negatives": [3]}, "negatives is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            embedding_pair(wrong, "p")


def test_negatives_that_are_no_texts_are_named() -> None:
    for given in (5, {"a": 1}, [5]):
        with pytest.raises(ValueError, match=r"p: negatives is .*expected a text"):
            embedding_pair({"anchor": "q", "positive": "a", "negatives": given}, "p")


def test_only_the_needed_columns_are_read() -> None:
    assert columns_of("chat", "a.b")[0] == "a"
    assert columns_of("text", "a.b") == ("a.b", "a")
    assert columns_of("embedding", "text")[:2] == ("anchor", "positive")
