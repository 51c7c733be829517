# $ enginehouse serve &
# $ python examples/02_stream.py
# The| capital| of| France| is| Paris|.|
# finished: stop, completion tokens: 8
"""Read an answer while it is made: server-sent events, without any client library but httpx."""

import json

import httpx

body = {
    "model": "starter",
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Name the capital of France."}],
}
with httpx.stream("POST", "http://127.0.0.1:8080/v1/chat/completions", json=body, timeout=60) as response:
    response.raise_for_status()
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue  # empty lines part the events, lines with a colon first are keep-alive comments
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                print(text, end="|")
            finish_reason = choice["finish_reason"]
        if chunk.get("usage"):
            print(f"\nfinished: {finish_reason}, completion tokens: {chunk['usage']['completion_tokens']}")
