"""Chat templates, rendered exactly as transformers renders them, in jinja2's sandbox.

Invariant: a template sees plain data only and changes none of it; the same conversation gives the
text that `apply_chat_template(tokenize=False)` gives. `{% generation %}` blocks say which
characters the assistant wrote.

    templates = ChatTemplates({"default": text}, {"eos_token": "</s>"})
    templates.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True).text
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe_train.errors import TrainValueError
from moe_train.tokenization.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_json

_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
# Names under which a message's reasoning is passed; templates read the first, GPT-OSS the second.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# What jinja2 and the expressions of a template raise for data that they were not written for.
_FAULTS: Final = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text, and the (first, end) characters of its `{% generation %}` blocks."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplates:
    """The templates of a tokenizer by name; `tool_use` is taken where tools are given."""

    __slots__ = ("texts", "variables")

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self.variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation as text.

        Raises:
            ValueError: there is no template, it cannot be read, or it refuses the conversation; or
                tools are no list.
        """
        if not isinstance(tools, list | tuple | None):  # a template would go through its characters
            raise TrainValueError(
                f"tools is {type(tools).__name__} {tools!r:.50}, expected a list of objects; where "
                "it is JSON written as text, put the list itself there"
            )
        template = _compiled(self.text_for(tools))
        extension = template.environment.extensions[_GenerationBlocks.identifier]
        blocks, spans = cast(_GenerationBlocks, extension).start()
        try:
            for block in template.generate(
                messages=[_as_seen(message) for message in messages],
                tools=None if tools is None else _plain_data(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            ):
                blocks.append(block)
        except _FAULTS as error:
            raise TrainValueError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}"
            ) from error
        return Rendered(text="".join(blocks), spans=tuple(spans))

    def marks_generation(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template has `{% generation %}` blocks."""
        return _GENERATION.search(self.text_for(tools)) is not None

    def text_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The template that is used for conversations with these tools."""
        if tools is not None and "tool_use" in self.texts:
            return self.texts["tool_use"]
        if "default" in self.texts:
            return self.texts["default"]
        if not self.texts:
            raise TrainValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template to a jinja file "
                "(for example that of the model's -Instruct sibling)"
            )
        raise TrainValueError(
            f"the tokenizer has chat templates {', '.join(sorted(self.texts))} and none named "
            "default; set tokenizer.chat_template to a jinja file"
        )


def templates_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """The chat templates among a tokenizer's files, by name; empty where there is none.

    Raises:
        ValueError: `chat_template` of tokenizer_config.json is neither text nor a list of them.
    """
    if CHAT_TEMPLATE in files:
        return {"default": files[CHAT_TEMPLATE].decode()}
    given = read_json(files, TOKENIZER_CONFIG).get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    try:
        pairs = given.items() if isinstance(given, dict) else [_named(item) for item in given]
        return {str(name): str(text) for name, text in pairs}
    except (KeyError, TypeError) as error:
        raise TrainValueError(
            f"chat_template of {TOKENIZER_CONFIG} is {type(given).__name__}; expected text, or a "
            "list of templates, each with name and template"
        ) from error


def _named(item: Mapping[str, str]) -> tuple[str, str]:
    return item["name"], item["template"]


def _as_seen(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it on: no keys of null, reasoning under both its names."""
    seen = {key: _plain_data(value) for key, value in message.items() if value is not None}
    reasoning = next((seen[key] for key in _REASONING if key in seen), None)
    if reasoning is not None:
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


def _plain_data(value: Any) -> Any:
    """A copy of JSON's types, without the classes' methods."""
    if isinstance(value, Mapping):
        return {_plain_data(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TrainValueError(
        f"a message or tool holds {type(value).__name__} {value!r}; a template takes JSON's types"
    )


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}`: prints its body, and notes where it stands in the text so far."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._blocks: list[str] = []
        self._spans: list[tuple[int, int]] = []

    def start(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Lists for the parts of the next text and for its spans."""
        self._blocks, self._spans = [], []
        return self._blocks, self._spans

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_printed"), [], [], body).set_lineno(line)

    def _printed(self, caller: Callable[[], str]) -> str:
        text = caller()
        first = sum(map(len, self._blocks))
        self._spans.append((first, first + len(text)))
        return text


class _Dict:
    """`dict` as templates may use it, without a class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escapes of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict()
    )
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise TrainValueError(
            f"the chat template cannot be read, line {getattr(error, 'lineno', 0)}: {error}"
        ) from error
