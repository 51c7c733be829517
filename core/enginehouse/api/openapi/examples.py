"""Example requests; tests send every one of them."""

from __future__ import annotations

from typing import Any

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}
_CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Lyon"]}, "is_capital": {"type": "boolean"}},
    "required": ["name", "is_capital"],
    "additionalProperties": False,
}

REQUEST_EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "ChatCompletionRequest": {
        "A chat": {"messages": _MESSAGES, "max_tokens": 16, "temperature": 0.7},
        "A stream with token counts": {
            "messages": [{"role": "system", "content": "Be brief."}, *_MESSAGES],
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "Two answers with log-probabilities": {
            "messages": _MESSAGES,
            "n": 2,
            "seed": 7,
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
        },
        "A raw prompt": {"prompt": "The capital of France is", "max_tokens": 8, "stop": ["\n"]},
        "An answer that matches a JSON Schema": {
            "messages": _MESSAGES,
            "max_tokens": 64,
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
        },
        "A tool that must be called": {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "max_tokens": 128,
            "tools": [_WEATHER],
            "tool_choice": "required",
        },
        "The result of a tool": {
            "messages": [
                {"role": "user", "content": "What is the weather in Paris?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 24 degrees."},
            ],
            "max_tokens": 16,
            "tools": [_WEATHER],
        },
    },
    "CompletionRequest": {
        "A text": {"prompt": "Once upon a time", "max_tokens": 16},
        "A stream": {"prompt": "Once upon a time", "max_tokens": 16, "stream": True},
        "Several prompts": {"prompt": ["One", "Two"], "n": 2, "max_tokens": 4},
        "Token ids": {"prompt": [72, 105], "max_tokens": 4},
        "How probable a text is": {"prompt": "Once upon a time", "echo": True, "logprobs": 0, "max_tokens": 0},
        "The best of three": {"prompt": "Once upon a time", "best_of": 3, "max_tokens": 8},
        "One of several words": {
            "prompt": "Paris is the capital of",
            "structured_outputs": {"choice": ["France", "Spain"]},
            "max_tokens": 16,
        },
    },
    "TokenizeRequest": {
        "A text, as llama-server takes it": {"content": "Hello world", "with_pieces": True},
        "A text, as vLLM takes it": {"prompt": "Hello world", "return_token_strs": True},
        "A chat": {"messages": _MESSAGES},
    },
    "DetokenizeRequest": {"Token ids": {"tokens": [72, 105]}},
    "RouteRequest": {"A chat": {"messages": _MESSAGES}},
    "CompressRequest": {"A chat": {"messages": _MESSAGES}},
    "ApplyTemplateRequest": {"A chat": {"messages": _MESSAGES}},
}
"""Component name to examples by title; each runs on any model."""
