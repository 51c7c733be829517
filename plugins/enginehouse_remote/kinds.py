"""Supported parameters of each kind of server, and their spelling. A table: does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from attrs import field, frozen

from enginehouse.contract.fields import FIELDS
from enginehouse.contract.types import ConstraintKind
from enginehouse_remote.options import Kind

__all__ = ["ALL_PARAMETERS", "KINDS", "KindOfServer"]

_OPENAI = (
    "messages prompt n temperature top_p seed presence_penalty frequency_penalty logit_bias logprobs num_logprobs "
    "top_logprobs stop max_tokens tools tool_choice parallel_tool_calls response_format"
)
_TEMPLATE = "chat_template_kwargs enable_thinking"

_BY_CORE = ("server", "cache", "caller")
ALL_PARAMETERS = frozenset(
    (
        "n",
        "prompt",
        "num_logprobs",
        "num_prompt_logprobs",
        *(name for name, row in FIELDS.items() if row.by not in _BY_CORE),
    )
)
"""All parameters for which a remote engine must declare a capability."""

_SCHEMAS: tuple[ConstraintKind, ...] = ("json_object", "json_schema")


@frozen(kw_only=True)
class KindOfServer:
    """API dialect of one kind of server.

    Attributes:
        parameters: supported request fields, by the names that our clients use.
        names: the server's names of fields that it calls differently.
        off: values that disable a parameter there, if they differ from ours.
        constraints: supported constraint kinds.
        min_top_logprobs: minimum number of alternatives to request; with fewer the server reports nothing at all.
        constraint_fields: maps a constraint kind to the field that takes its text; ``structured_outputs`` takes the
            others.
        switch: it supports the field ``enable_thinking``; otherwise the switch is passed in the template's variables.
        adapters: how it takes an adapter: in the field ``adapters`` with scales, or as ``model``; None: it has none, or
            may answer with the base model for a name that it does not know.
    """

    parameters: frozenset[str]
    names: Mapping[str, str] = field(factory=dict)
    off: Mapping[str, int] = field(factory=dict)
    constraints: tuple[ConstraintKind, ...] = _SCHEMAS
    min_top_logprobs: int = 0
    constraint_fields: Mapping[str, str] = field(factory=dict)
    switch: bool = False
    adapters: Literal["field", "model"] | None = None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRUCTURED = "json_schema guided_json guided_regex guided_choice guided_grammar grammar structured_outputs"

KINDS: Mapping[Kind, KindOfServer] = MappingProxyType(
    {
        "openai": KindOfServer(parameters=_names(f"{_OPENAI} reasoning_effort json_schema guided_json")),
        "enginehouse": KindOfServer(
            parameters=ALL_PARAMETERS
            - _names(
                "suffix num_prompt_logprobs prompt_logprobs loglikelihood token_details return_progress "
                "return_token_ids prediction continue_final_message add_generation_prompt include_stop_str_in_output"
            ),
            constraints=(*_SCHEMAS, "regex", "choice", "lark", "gbnf"),
            switch=True,
            adapters="field",
        ),
        "vllm": KindOfServer(
            parameters=_names(
                f"{_OPENAI} {_TEMPLATE} {_STRUCTURED} reasoning_effort top_k min_p repetition_penalty stop_token_ids "
                "min_tokens ignore_eos"
            ),
            off={"top_k": -1},
            constraints=(*_SCHEMAS, "regex", "choice", "lark", "gbnf"),
            adapters="model",
        ),
        "sglang": KindOfServer(
            parameters=_names(
                f"{_OPENAI} {_TEMPLATE} reasoning_effort top_k min_p repetition_penalty stop_token_ids min_tokens "
                "ignore_eos json_schema guided_json guided_regex structured_outputs"
            ),
            off={"top_k": -1},
            constraints=(*_SCHEMAS, "regex"),
            constraint_fields={"regex": "regex"},
        ),
        "tei": KindOfServer(parameters=frozenset(), constraints=()),  # generates nothing
        "llamacpp": KindOfServer(
            parameters=_names(
                f"{_OPENAI} {_TEMPLATE} top_k min_p repetition_penalty repeat_last_n ignore_eos json_schema "
                "guided_json grammar guided_grammar structured_outputs"
            ),
            names={"repetition_penalty": "repeat_penalty"},
            constraints=(*_SCHEMAS, "gbnf"),
            min_top_logprobs=1,
            constraint_fields={"gbnf": "grammar"},
        ),
    }
)
