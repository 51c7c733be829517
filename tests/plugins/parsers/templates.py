"""Chat templates of the tests: what a template writes for the examples, and small templates of every kind."""

from __future__ import annotations

from enginehouse.contract.errors import RenderError
from enginehouse.contract.parsers import EXAMPLES, QUESTION, RESULTS, ChatFormat, ToolFormat
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render

__all__ = ["TEMPLATES", "with_examples", "written_calls"]


def with_examples(template: str) -> ChatFormat:
    """The template with the texts that it writes, as core hands it to parsers."""
    texts, failures = {}, {}
    for name, example in EXAMPLES.items():
        tools = [tool.definition for tool in example.tools]
        prompt = ChatPrompt(
            template=template,
            messages=example.messages,
            bos_token="<s>",
            eos_token="</s>",
            add_generation_prompt=example.opens,
            continues=False,
            extra={**example.variables, **({"tools": tools} if tools else {})},
        )
        try:
            texts[name] = "".join(segment.text for segment in render(prompt, 1_000_000))
        except RenderError as error:
            failures[name] = error.message
    return ChatFormat(template, {}, texts, failures)


def written_calls(model: ChatFormat, example: str, tool_format: ToolFormat) -> str:
    """What the template writes from the first marker of its calls up to the first result; "" if it writes no calls."""
    text = model.examples.get(example, "")
    start = text.rfind(QUESTION) + len(QUESTION)
    turn = text[start : text.find(RESULTS[0], start)]
    place = turn.find(EXAMPLES[example].messages[1].tool_calls[0].name)
    if place < 0 or RESULTS[0] not in text:
        return ""
    before = [turn.find(marker, 0, place) for marker in tool_format.markers]
    first = min((position for position in before if position >= 0), default=-1)
    if first < 0:  # calls begin without a marker
        first = turn.rfind("```", 0, place)
    if first < 0:
        first = max(turn.rfind("{", 0, place), turn.rfind("[", 0, place), turn.rfind("\n", 0, place) + 1)
        first -= turn[:first].endswith("[")
    return turn[first:]


def _template(calls: str, *, start: str = "", end: str = "", separator: str = "") -> str:
    """A template in which each call of a turn is written by ``calls``, with ``call`` for its function."""
    return (
        "{% if tools %}<|sys|>{{ tools | tojson }}<|end|>{% endif %}"
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% if message.tool_calls %}" + start + "{% for one in message.tool_calls %}{% set call = one.function %}"
        "{% if not loop.first %}" + separator + "{% endif %}" + calls + "{% endfor %}" + end + "{% endif %}"
        "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


_JSON = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
_VALUE = "{{ value if value is string else value | tojson }}"


def _tagged(before: str, parameter: str, after: str) -> str:
    body = "{% for key, value in call.arguments.items() %}" + parameter + "{% endfor %}"
    return before + body + after


TEMPLATES: dict[str, tuple[str, str]] = {
    "objects between tags": ("hermes", _template(f"\n<tool_call>\n{_JSON}\n</tool_call>")),
    "a list of objects": (
        "mistral",
        _template(_JSON, start="[TOOL_CALLS][", end="]", separator=", "),
    ),
    "a list between tags": ("template", _template(_JSON, start="<calls>[", end="]</calls>", separator=", ")),
    "words and a fence": (
        "template",
        _template(_JSON, start="Action:\n```json\n[", end="]```", separator=", "),
    ),
    "objects in a section": ("template", _template(f"\n{_JSON}", start="<calls>", end="\n</calls>")),
    "other members": (
        "template",
        _template(
            '<do>{"id": "{{ one.id }}", "tool_name": "{{ call.name }}", '
            '"parameters": {{ call.arguments | tojson }}}</do>'
        ),
    ),
    "the name is the key": (
        "template",
        _template('{"{{ call.name }}": {{ call.arguments | tojson }}}', start="<|do|>[", end="]<|no|>", separator=", "),
    ),
    "a bare object": (
        "llama3",
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.tool_calls %}"
        "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{% set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": '
        "{{ call.arguments | tojson }}}{% else %}{{ message.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ),
    "a name and an object": (
        "mistral-named",
        _template("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"),
    ),
    "numbered names": (
        "template",
        _template(
            "<|call|>functions.{{ call.name }}:{{ loop.index0 }}<|args|>{{ call.arguments | tojson }}<|call_end|>",
            start="<|calls|>", end="<|calls_end|>",
        ),
    ),
    "keyword arguments": (
        "pythonic",
        _template(
            "{{ call.name }}({% for key, value in call.arguments.items() %}{{ key }}={{ value | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            start="<|tool_call_start|>[", end="]<|tool_call_end|>", separator=", ",
        ),
    ),
    "keyword arguments as texts": (
        "pythonic",
        _template(
            "{{ call.name }}({% for key, value in call.arguments.items() %}{{ key }}=\"{{ value }}\""
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            start="[", end="]", separator=", ",
        ),
    ),
    "members as texts": (
        "gemma",
        _template(
            "<start_function_call>call:{{ call.name }}{{ '{' }}{% for key, value in call.arguments.items() %}"
            "{{ key }}:<escape>{{ value }}<escape>{% if not loop.last %},{% endif %}{% endfor %}}<end_function_call>"
        ),
    ),
    "tags with line breaks": (
        "qwen3-coder",
        _template(
            _tagged("\n<tool_call>\n<function={{ call.name }}>\n",
                    f"<parameter={{{{ key }}}}>\n{_VALUE}\n</parameter>\n", "</function>\n</tool_call>")
        ),
    ),
    "keys and values": (
        "glm",
        _template(
            _tagged("\n<tool_call>{{ call.name }}\n",
                    f"<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n", "</tool_call>")
        ),
    ),
    "tags with types": (
        "template",
        _template(
            _tagged('<invoke name="{{ call.name }}">\n',
                    "<p name=\"{{ key }}\" text=\"{{ 'yes' if value is string else 'no' }}\">" + _VALUE + "</p>\n",
                    "</invoke>\n"),
            start="\n<calls>\n", end="</calls>",
        ),
    ),
}  # fmt: skip
"""Name of the parser, and the template."""
