"""Formats of known model families, as data: for templates that do not write calls themselves, and as names."""

from __future__ import annotations

import re

from attrs import evolve, field, frozen

from enginehouse_parsers.syntax import ID, INDEX, KEY, NAME, TYPE, ToolSyntax

__all__ = ["HERMES", "NAMED", "NamedFormat"]


@frozen
class NamedFormat:
    """A format and how to recognise it.

    Attributes:
        marks: pattern that occurs in templates of this format only.
        families: models that use it, for the documentation.
        is_fixed: the model writes more forms than its template, so that nothing is derived.
    """

    name: str
    families: str
    marks: re.Pattern[str] = field(converter=lambda text: re.compile(text, re.DOTALL))
    syntax: ToolSyntax
    is_fixed: bool = False


HERMES = ToolSyntax(
    kind="object",
    call_start='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    call_end="}\n</tool_call>",
    separator="\n",
)
_LISTED = ToolSyntax(
    kind="object",
    section_start="[",
    call_start='{"name": "',
    name_end='", "arguments": ',
    call_end="}",
    separator=", ",
    section_end="]",
)
"""A list of objects, which most formats put after a marker."""
_DSML_VALUE = {
    "name_end": '">\n',
    "parameter_start": '<｜DSML｜parameter name="',  # noqa: RUF001 - characters of its own
    "key_end": f'" string="{TYPE}">',
    "value_end": "</｜DSML｜parameter>\n",  # noqa: RUF001
    "type_words": (("string", "true"), ("", "false")),
}

NAMED: tuple[NamedFormat, ...] = (
    NamedFormat(
        "harmony",
        "gpt-oss",
        r"<\|channel\|>analysis<\|message\|>",
        ToolSyntax(
            kind="named",
            call_start="<|channel|>commentary to=functions.",
            name_end=" <|constrain|>json<|message|>",
            call_end="<|call|>",
            is_single=True,
            openers=("<|channel|>commentary to=functions.", " to=functions."),
            closers=("<|call|>",),
            name_extras=("<|channel|>", "commentary", "json", "<|constrain|>", "<|message|>"),
            ignored=(
                "<|start|>assistant",
                "<|end|>",
                "<|return|>",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
            ),
        ),
        is_fixed=True,
    ),
    NamedFormat(
        "hermes",
        "Hermes, Qwen 2.5 and 3, QwQ, Granite 4, MiMo, Bielik",
        r"""<tool_call>[\\n\s"'{}~+-]{0,30}\{\\?["'](?:name|arguments)""",
        HERMES,
    ),
    NamedFormat(
        "llama3",
        "Llama 3.1 to 3.3, Llama 4",
        r'<\|start_header_id\|>(?!.*<function=).*(?:<\|python_tag\|>|"parameters": )'
        r'|"parameters": .*<\|header_start\|>',
        ToolSyntax(
            kind="object",
            call_start='{"name": "',
            name_end='", "parameters": ',
            call_end="}",
            is_single=True,
            openers=("<|python_tag|>",),
            ignored=("<|eom_id|>",),
        ),
    ),
    NamedFormat(
        "mistral-named",
        "Mistral Small 3.2, Ministral 3, Devstral, Magistral",
        r"\[ARGS\]",
        ToolSyntax(kind="named", call_start="[TOOL_CALLS]", name_end="[ARGS]", name_extras=("[CALL_ID]", ID)),
    ),
    NamedFormat(
        "mistral",
        "Mistral 7B to Nemo",
        r"\[TOOL_CALLS\]",
        evolve(_LISTED, section_start="[TOOL_CALLS][", ignored=("[ARGS]", "[CALL_ID]")),
    ),
    NamedFormat(
        "qwen3-coder",
        "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
        r"<tool_call>.{0,20}<function=.*<parameter=",
        ToolSyntax(
            kind="tagged",
            call_start="<tool_call>\n<function=",
            name_end=">\n",
            parameter_start="<parameter=",
            key_end=">\n",
            value_end="\n</parameter>\n",
            call_end="</function>\n</tool_call>",
            separator="\n",
        ),
    ),
    NamedFormat(
        "seed-oss",
        "Seed-OSS",
        r"<seed:tool_call>",
        ToolSyntax(
            kind="tagged",
            call_start="<seed:tool_call>\n<function=",
            name_end=">\n",
            parameter_start="<parameter=",
            key_end=">",
            value_end="</parameter>\n",
            call_end="</function>\n</seed:tool_call>",
            separator="\n",
        ),
    ),
    NamedFormat(
        "glm",
        "GLM 4.5 to 5, Ling 3, Laguna, Spark",
        r"<arg_key>",
        ToolSyntax(
            kind="tagged",
            call_start="<tool_call>",
            name_end="\n",
            parameter_start="<arg_key>",
            key_end="</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
            call_end="</tool_call>",
            separator="\n",
        ),
    ),
    NamedFormat(
        "minimax-m2",
        "MiniMax M2",
        r"<minimax:tool_call>",
        ToolSyntax(
            kind="tagged",
            section_start="<minimax:tool_call>\n",
            call_start='<invoke name="',
            name_end='">\n',
            parameter_start='<parameter name="',
            key_end='">',
            value_end="</parameter>\n",
            call_end="</invoke>\n",
            section_end="</minimax:tool_call>",
        ),
    ),
    NamedFormat(
        "deepseek-dsml",
        "DeepSeek V3.2 and V4",
        r"DSML",
        ToolSyntax(
            kind="tagged",
            section_start="<｜DSML｜function_calls>\n",  # noqa: RUF001
            call_start='<｜DSML｜invoke name="',  # noqa: RUF001
            call_end="</｜DSML｜invoke>\n",  # noqa: RUF001
            section_end="</｜DSML｜function_calls>",  # noqa: RUF001
            openers=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke name="),  # noqa: RUF001
            closers=("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),  # noqa: RUF001
            **_DSML_VALUE,  # type: ignore[arg-type]
        ),
    ),
    NamedFormat(
        "deepseek-v3",
        "DeepSeek V3 and R1",
        r"<｜tool▁sep｜>.*```json",  # noqa: RUF001
        ToolSyntax(
            kind="named",
            section_start="<｜tool▁calls▁begin｜>",  # noqa: RUF001
            call_start="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",  # noqa: RUF001
            name_end="\n```json\n",
            call_end="\n```<｜tool▁call▁end｜>",  # noqa: RUF001
            section_end="<｜tool▁calls▁end｜>",  # noqa: RUF001
            separator="\n",
        ),
    ),
    NamedFormat(
        "deepseek-v3.1",
        "DeepSeek V3.1",
        r"<｜tool▁sep｜>",  # noqa: RUF001
        ToolSyntax(
            kind="named",
            section_start="<｜tool▁calls▁begin｜>",  # noqa: RUF001
            call_start="<｜tool▁call▁begin｜>",  # noqa: RUF001
            name_end="<｜tool▁sep｜>",  # noqa: RUF001
            call_end="<｜tool▁call▁end｜>",  # noqa: RUF001
            section_end="<｜tool▁calls▁end｜>",  # noqa: RUF001
        ),
    ),
    NamedFormat(
        "kimi-k2",
        "Kimi K2",
        r"<\|tool_call_argument_begin\|>",
        ToolSyntax(
            kind="named",
            section_start="<|tool_calls_section_begin|>",
            call_start="<|tool_call_begin|>functions.",
            name_end=f":{INDEX}<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            section_end="<|tool_calls_section_end|>",
        ),
    ),
    NamedFormat(
        "kimi-k3",
        "Kimi K3",
        r"<\|open\|>",
        ToolSyntax(
            kind="tagged",
            section_start="<|open|>tools<|sep|>",
            call_start='<|open|>call tool="',
            name_end=f'" index="{INDEX}"<|sep|>',
            parameter_start='<|open|>argument key="',
            key_end=f'" type="{TYPE}"<|sep|>',
            value_end="<|close|>argument<|sep|>",
            call_end="<|close|>call<|sep|>",
            section_end="<|close|>tools<|sep|>",
            type_words=(
                *((kind, kind) for kind in ("string", "boolean", "array", "object", "null")),
                ("", "number"),
            ),
            openers=("<|open|>tools<|sep|>", '<|open|>call tool="'),
            closers=("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
            ignored=("<|close|>message<|sep|>",),
        ),
    ),
    NamedFormat(
        "gemma",
        "Gemma 4, FunctionGemma",
        r"<\|tool_call>|<start_function_call>",
        ToolSyntax(
            kind="named",
            call_start="<|tool_call>call:",
            call_end="<tool_call|>",
            quotes=('<|"|>', "<escape>"),
            openers=("<|tool_call>", "<start_function_call>", "call"),
            closers=("<tool_call|>", "<end_function_call>"),
        ),
    ),
    NamedFormat(
        "command-r",
        "Command R7B, Command A",
        r"<\|START_ACTION\|>",
        ToolSyntax(
            kind="object",
            section_start="<|START_ACTION|>[\n    ",
            call_start=f'{{"tool_call_id": "{INDEX}", "tool_name": "',
            name_end='", "parameters": ',
            call_end="}",
            separator=",\n    ",
            section_end="\n]<|END_ACTION|>",
            ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    ),
    NamedFormat(
        "granite3",
        "Granite 3",
        r"<\|tool_call\|>",
        evolve(_LISTED, section_start="<|tool_call|>["),
    ),
    NamedFormat(
        "nemotron",
        "Nemotron Nano 2",
        r"<TOOLCALL>",
        evolve(_LISTED, section_start="<TOOLCALL>[", section_end="]</TOOLCALL>"),
    ),
    NamedFormat(
        "functionary-v3.1",
        "Functionary 3.1, Llama 3 with <function=...>",
        r"<function=",
        ToolSyntax(kind="named", call_start="<function=", name_end=">", call_end="</function>"),
    ),
    NamedFormat(
        "olmo3",
        "OLMo 3",
        r"<function_calls>",
        ToolSyntax(
            kind="keywords",
            section_start="<function_calls>\n",
            separator="\n",
            section_end="\n</function_calls>",
        ),
    ),
    NamedFormat(
        "pythonic",
        "LFM2, Llama 4 with Python calls, ToolACE",
        r"func_name1\(|<\|tool_call_start\|>|<\|python_start\|>|<\|tool_list_start\|>|List of tools: \[",
        ToolSyntax(
            kind="keywords",
            section_start="[",
            separator=", ",
            section_end="]",
            openers=("<|python_start|>", "<|tool_call_start|>"),
            closers=("<|python_end|>", "<|tool_call_end|>"),
        ),
    ),
    NamedFormat(
        "phi4",
        "Phi-4 mini, xLAM",
        r"<\|tool\|>",
        evolve(_LISTED, openers=("<|tool_call|>", "functools"), closers=("<|/tool_call|>",)),
    ),
    NamedFormat(
        "functionary-v3.2",
        "Functionary 3.2",
        r">>>",
        ToolSyntax(  # the prompt ends with the first marker
            kind="named",
            name_end="\n",
            separator=">>>",
            openers=(">>>",),
            ignored=(">>>all\n",),
            text_start="all\n",
        ),
    ),
    NamedFormat(
        "atem",
        "Muse",
        r"<atem:invoke",
        ToolSyntax(
            kind="tagged",
            call_start=f' to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="',
            name_end='">\n',
            parameter_start='<atem:parameter name="',
            key_end='">',
            value_end="</atem:parameter>\n",
            call_end="</atem:invoke>\n</atem:function_calls>",
            separator="<|eom|><|start|>assistant",
            openers=("<atem:function_calls>", "<atem:invoke name="),
            closers=("</atem:invoke>", "</atem:function_calls>"),
            ignored=("<|start|>assistant", "<|message|>", "<|eom|>", "<|eot|>"),
        ),
    ),
    NamedFormat(
        "minimax-m3",
        "MiniMax M3",
        r"\]<\]minimax\[>\[",
        ToolSyntax(
            kind="tagged",
            section_start="]<]minimax[>[<tool_call>\n",
            call_start=']<]minimax[>[<invoke name="',
            name_end='">',
            parameter_start="]<]minimax[>[<",
            key_end=">",
            value_end=f"]<]minimax[>[</{KEY}>",
            call_end="]<]minimax[>[</invoke>\n",
            section_end="]<]minimax[>[</tool_call>",
            openers=("]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="'),
            closers=("]<]minimax[>[</invoke>", "]<]minimax[>[</tool_call>"),
        ),
    ),
    NamedFormat(
        "solar",
        "Solar Open",
        r"<\|tool_call:begin\|>",
        ToolSyntax(
            kind="named",
            section_start="<|tool_calls|>",
            call_start=f"<|tool_call:begin|>{ID}<|tool_call:name|>",
            name_end="<|tool_call:args|>",
            call_end="<|tool_call:end|>",
            section_end="<|calls|>",
        ),
    ),
)
"""Most specific marks first: the first format whose marks occur in a template is the one that its text names."""
