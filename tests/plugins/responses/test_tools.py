"""Tools: functions, custom tools, namespaces and hosted ones, and how they may be chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse_responses.tools import Toolbox

NOW = {"type": "function", "name": "now"}
DATE = {"type": "custom", "name": "date", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}"}}
FREE = {"type": "custom", "name": "write", "description": "Write.", "format": {"type": "text"}}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [{**NOW, "name": "read"}, FREE]}
LARK = {"type": "custom", "name": "yes", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "y"+'}}


def _toolbox(*tools: Any) -> Toolbox:
    toolbox = Toolbox()
    toolbox.add(list(tools), "tools")
    return toolbox


def test_tools_of_all_kinds_are_functions_for_the_model() -> None:
    toolbox = _toolbox(NOW, {"type": "web_search"}, DATE, FILES, {"type": "mcp", "server_label": "x"}, LARK)
    use = toolbox.use(None, False)

    assert use is not None and use.parallel is False
    assert [tool.name for tool in use.tools] == ["now", "date", "mcp__files__read", "mcp__files__write", "yes"]
    assert toolbox.left_out == ["tools[1]", "tools[4]"]
    assert [tool["type"] for tool in toolbox.echoed] == ["function", "custom", "namespace", "custom"]
    assert toolbox.echoed[0] == {**NOW, "description": None, "parameters": None, "strict": None}
    known = toolbox.find("mcp__files__write")
    assert known is not None and (known.kind, known.name, known.namespace) == ("custom", "write", "mcp__files")


@pytest.mark.parametrize(("tool", "matching", "other"), [(DATE, "2026", "26"), (LARK, "yy", "n")])
def test_a_format_becomes_a_pattern_and_is_described(tool: dict[str, Any], matching: str, other: str) -> None:
    use = _toolbox(tool).use(None, None)

    assert use is not None and use.tools[0].strict
    pattern = use.tools[0].parameters["properties"]["input"]["pattern"]
    assert (
        re.search(pattern, matching)
        and not re.search(pattern, other)
        and not re.search(pattern, f"{matching}\n{other}")
    )
    function = use.tools[0].definition["function"]
    assert tool["format"]["definition"] in function["description"] and "pattern" not in str(function["parameters"])


@pytest.mark.parametrize(
    ("choice", "mode", "only", "allowed"),
    [
        ("auto", "auto", None, None),
        ("none", "none", None, None),
        ("required", "required", None, None),
        ({"type": "function", "name": "now"}, "required", "now", None),
        ({"type": "custom", "name": "date"}, "required", "date", None),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, "required", "mcp__files__read", None),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [NOW, DATE, {"type": "web_search"}]},
            "auto",
            None,
            frozenset({"now", "date"}),
        ),
        ({"type": "web_search"}, "auto", None, None),
    ],
)
def test_choices(choice: Any, mode: str, only: str | None, allowed: frozenset[str] | None) -> None:
    use = _toolbox(NOW, DATE, FILES).use(choice, None)

    assert use is not None and (use.choice, use.only, use.allowed) == (mode, only, allowed)


def test_hosted_tools_alone_are_no_tools() -> None:
    assert _toolbox({"type": "web_search"}).use("required", None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "path"),
    [
        ({}, None, "tools"),
        (["now"], None, "tools[0]"),
        ([{"name": "now"}], None, "tools[0].type"),
        ([{"type": "teleport"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].name"),
        ([{"type": "function", "name": "two words"}], None, "tools[0].name"),
        ([NOW, NOW], None, "tools[1].name"),
        ([NOW] * 0 + [{**NOW, "name": f"n{n}"} for n in range(200)], None, "tools"),
        ([{**NOW, "parameters": {"type": "string"}}], None, "tools[0].parameters.type"),
        ([{**NOW, "strict": "yes"}], None, "tools[0].strict"),
        ([{**FILES, "tools": [FILES]}], None, "tools[0].tools[0].type"),
        ([{**LARK, "format": {"type": "grammar", "syntax": "peg"}}], None, "tools[0].format.syntax"),
        (
            [{**LARK, "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
            None,
            "tools[0].format.definition",
        ),
        ([], "required", "tool_choice"),
        ([NOW], 7, "tool_choice"),
        ([NOW], {"type": "magic"}, "tool_choice.type"),
        ([NOW], {"type": "function", "name": "later"}, "tool_choice.name"),
        ([NOW], {"type": "custom", "name": "now"}, "tool_choice.name"),
        ([NOW], {"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ([NOW], {"type": "allowed_tools", "mode": "auto", "tools": [DATE]}, "tool_choice.tools[0].name"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(tools: Any, choice: Any, path: str) -> None:
    toolbox = Toolbox()
    with pytest.raises(InvalidRequest) as refused:
        toolbox.add(tools, "tools")
        toolbox.use(choice, None)

    assert refused.value.param == path
