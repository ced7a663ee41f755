"""What a template may do and see; the same text as transformers is shown in the seam test."""

import pytest

from moe_train.tokenization.template import ChatTemplates, templates_in

USER = [{"role": "user", "content": "<b>é", "name": None}]


def rendered(text: str, **more: object) -> str:
    templates = ChatTemplates({"default": text}, {"eos_token": "</s>"})
    return templates.render(USER, **more).text  # type: ignore[arg-type]


def test_templates_see_transformers_variables_and_filters() -> None:
    assert rendered("{{ messages[0].content | tojson }}{{ eos_token }}") == '"<b>é"</s>'
    assert rendered("{{ tools is none }}{{ documents is none }}{{ 'name' in messages[0] }}") == (
        "TrueTrueFalse"
    )
    assert rendered(
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4
    assert rendered("{{ tools[0].a | tojson(indent=2) }}", tools=[{"a": [1]}]) == "[\n  1\n]"


def test_templates_stay_in_the_sandbox() -> None:
    for text in (
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('no tools here') }}",
        "{{ messages[0].content + 1 }}",
    ):
        with pytest.raises(ValueError, match="the chat template refuses the conversation"):
            rendered(text)
    with pytest.raises(ValueError, match="cannot be read, line 1"):
        rendered("{% if %}")
    with pytest.raises(ValueError, match="holds set"):
        rendered("{{ tools }}", tools=[{"a": {1}}])


@pytest.mark.parametrize("tools", ['[{"name": "f"}]', {"name": "f"}])
def test_tools_that_are_no_list_are_refused(tools: object) -> None:
    with pytest.raises(ValueError, match=f"tools is {type(tools).__name__} .*expected a list"):
        rendered("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", tools=tools)


def test_generation_blocks_are_found_by_their_characters() -> None:
    templates = ChatTemplates({"default": "ab{% generation %}cd{% endgeneration %}e"}, {})
    assert templates.marks_generation(None)
    assert templates.render(USER).spans == ((2, 4),)
    assert templates.render(USER).spans == ((2, 4),)


def test_a_template_is_chosen_by_name() -> None:
    templates = ChatTemplates({"default": "d", "tool_use": "t"}, {})
    assert [templates.render(USER, tools=t).text for t in (None, [{}])] == ["d", "t"]
    with pytest.raises(ValueError, match="rag and none named default"):
        ChatTemplates({"rag": "r"}, {}).render(USER)
    with pytest.raises(ValueError, match=r"no chat template; set tokenizer\.chat_template"):
        ChatTemplates({}, {}).render(USER)


def test_templates_of_a_wrong_shape_are_refused() -> None:
    files = {"tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'}
    with pytest.raises(ValueError, match="each with name and template"):
        templates_in(files)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json of the tokenizer is not JSON"):
        templates_in({"tokenizer_config.json": b"{"})
