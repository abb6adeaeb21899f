"""Chat templates as published models have them."""

import json

import pytest

from dataplane.gateway.chat_template import ChatTemplate
from dataplane.gateway.errors import HttpFault

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}<{{ part['text'] }}>{% endif %}{% endfor %}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]


def template(source, **config) -> ChatTemplate:
    """A template with some special tokens."""
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": source}
    return ChatTemplate(json.dumps(values | config).encode())


def test_a_conversation_is_rendered_with_its_generation_prompt():
    """Blocks are trimmed as transformers does; the generation prompt is there unless taken away."""
    chatml = template(CHATML)

    start = "<|im_start|>user\nhi<|im_end|>\n"
    assert chatml.render(HI) == start + "<|im_start|>assistant\n"
    assert chatml.render(HI, add_generation_prompt=False) == start


def test_special_tokens_are_variables():
    """Given as text or as objects with a content."""
    assert template("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}").render(HI) == "<s>|</s>|"


def test_content_in_parts_becomes_text_unless_the_template_reads_parts():
    """Text parts are joined by line ends; templates that loop over content get them apart."""
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]

    assert template("{{ messages[0].content }}").render(parts) == "a\nb"
    assert template(PARTS).render(parts) == "[user]<a><b>"
    assert template(PARTS).render(HI) == "[user]<hi>"


def test_the_last_message_can_be_continued():
    """The prompt ends inside it, whatever the template puts after messages."""
    told = [*HI, {"role": "assistant", "content": "well"}]
    rendered = template(CHATML).render(
        told, add_generation_prompt=False, continue_final_message=True
    )

    assert rendered.endswith("<|im_start|>assistant\nwell")


def test_tools_and_variables_reach_the_template():
    """Arguments of earlier calls are objects; JSON is written without escapes for HTML."""
    source = (
        "{{ tools | tojson }}{{ thinking }}{{ messages[0].tool_calls[0].function.arguments.x }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    rendered = template(source).render(
        [message], tools=[{"name": "<f>"}], variables={"thinking": "yes"}
    )

    assert rendered == '[{"name": "<f>"}]yes7'


def test_named_templates():
    """With tools the one for tools, else the default."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]

    assert template(named).render(HI) == "plain"
    assert template(named).render(HI, tools=[{}]) == "tools"


def test_what_only_training_needs_is_read_and_left_out():
    """{% generation %} blocks, break and strftime_now do not stop a template."""
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"

    assert template(source).render(HI * 3) == "hi"
    assert len(template("{{ strftime_now('%Y') }}").render(HI)) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_templates_cannot_get_out_and_their_refusals_are_the_clients(source):
    """What the sandbox forbids, or the template refuses, is a 400 that names messages."""
    with pytest.raises(HttpFault) as caught:
        template(source).render(HI)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_models_without_a_template_say_so():
    """There is no other template to fall back on."""
    with pytest.raises(HttpFault, match="no chat template"):
        template(None)
    with pytest.raises(HttpFault, match="broken"):
        template("{% if %}")
