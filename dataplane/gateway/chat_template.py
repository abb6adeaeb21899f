"""A model's own chat template, rendered as transformers renders it.

Templates are programs that come with a model. They run in jinja2's immutable sandbox, with the blocks,
filters and functions that published templates count on, and with nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from dataplane.gateway.errors import HttpFault, refused

_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_CONTINUED = "\ue000continued\ue000"


class _Generation(jinja2.ext.Extension):
    """Reads `{% generation %}…{% endgeneration %}`, which only training makes use of."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance's

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        """Return the block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns conversations into prompts.

    Args:
        config: The model's tokenizer_config.json.

    Raises:
        HttpFault: It has no template, or one that is no jinja2.
    """

    def __init__(self, config: bytes) -> None:
        values = msgspec.json.decode(config, type=dict[str, Any])
        self._tokens = special_tokens(values)
        sources = _sources(values.get("chat_template"))
        if not sources:
            raise refused("messages", "the model has no chat template: use /v1/completions")
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(s) for name, s in sources.items()}
            self._wants_parts = {
                name: _reads_parts(environment.parse(s)) for name, s in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise HttpFault(500, f"the model's chat template is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: As the client sent them.
            tools: Functions that the template may describe.
            add_generation_prompt: End with what makes the assistant speak.
            continue_final_message: End inside the last message.
            variables: Further ones that the template may read.

        Raises:
            HttpFault: A message is not one of text, or the template refuses the conversation.
        """
        if continue_final_message and add_generation_prompt:
            raise refused("continue_final_message", "does not go with add_generation_prompt")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            name = next(iter(self._templates))
        wants_parts = self._wants_parts[name]
        conversation = [_message(m, i, wants_parts=wants_parts) for i, m in enumerate(messages)]
        if continue_final_message:
            _mark(conversation[-1])
        try:
            text = self._templates[name].render(
                **self._tokens,
                **(variables or {}),
                messages=conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise refused("messages", f"the model's chat template refuses them: {error}") from error
        return text.partition(_CONTINUED)[0] if continue_final_message else text


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a tokenizer's special tokens by name, as text."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _sources(template: Any) -> dict[str, str]:
    """Return templates by name; most models have one without a name."""
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {}


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON without the escapes that jinja2's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _message(message: Mapping[str, Any], index: int, *, wants_parts: bool) -> dict[str, Any]:
    """Return a message as the template reads it."""
    role = message.get("role")
    if not isinstance(role, str):
        raise refused(f"messages.{index}.role", "is required")
    read = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_part(part, f"messages.{index}.content.{i}") for i, part in enumerate(content)]
        parts = [{"type": "text", "text": text} for text in texts]
        read["content"] = parts if wants_parts else "\n".join(texts)
    elif content is None:
        read["content"] = ""
    elif not isinstance(content, str):
        raise refused(f"messages.{index}.content", "is neither text nor a list of parts")
    elif wants_parts:
        read["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        read["tool_calls"] = [_tool_call(c, index) for c in message["tool_calls"]]
    return read


def _part(part: Any, where: str) -> str:
    """Return the text of a content part."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for kind in ("text", "refusal"):
            if part.get("type", "text") in (kind, f"input_{kind}") and kind in part:
                return str(part[kind])
        raise refused(where, f"is of type {part.get('type')!r}; only text is taken")
    raise refused(where, "is no content part")


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """Return an earlier call of a tool, its arguments as an object, which templates expect."""
    try:
        read = {**call, "function": dict(call["function"])}
        arguments = read["function"].get("arguments")
        if isinstance(arguments, str):
            read["function"]["arguments"] = json.loads(arguments or "{}")
    except (TypeError, KeyError, ValueError) as error:
        raise refused(f"messages.{index}.tool_calls", f"cannot be read: {error!r}") from error
    return read


def _mark(message: dict[str, Any]) -> None:
    """Mark where the last message ends, so that the prompt can be cut there."""
    if isinstance(message["content"], list) and message["content"]:
        last = message["content"][-1]
        message["content"][-1] = {**last, "text": last["text"] + _CONTINUED}
    else:
        message["content"] = f"{message['content'] or ''}{_CONTINUED}"


def _reads_parts(template: jinja2.nodes.Template) -> bool:
    """Tell whether a template loops over a message's content: then it wants parts, not text."""
    names = {"content"}
    for node in template.find_all(jinja2.nodes.Assign):
        if _is_content(node.node, names) and isinstance(node.target, jinja2.nodes.Name):
            names.add(node.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(jinja2.nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    if isinstance(node, jinja2.nodes.Name):
        return node.name in names - {"content"}
    return False
