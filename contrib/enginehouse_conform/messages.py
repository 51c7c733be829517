"""H21, H22, H35 and H36: forms of prompts."""

from __future__ import annotations

from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, require
from enginehouse_conform.reading import answered, content_of, offered, refused

__all__ = ["CHECKS"]

_CONTROL = ("<|im_end|>", "<|im_start|>", "<end_of_turn>", "<|eot_id|>", "<|endoftext|>")


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _bad_messages(target: Target) -> None:
    bad: tuple[Any, ...] = ([], "hi", [5], [{}], [{"role": 3, "content": "a"}], _user(12))
    for messages in bad:
        refused(target.chat(messages=messages), f"messages {messages!r}")
    body = target.chat_body()
    del body["messages"]
    refused(target.post("/chat/completions", body), "a chat without messages", "messages")


def _parts(target: Target) -> None:
    text = "Say something about the sea."
    plain = answered(target.chat(messages=_user(text)))
    parts = answered(target.chat(messages=_user([{"type": "text", "text": text}])), "a text in parts")
    require(plain["usage"]["prompt_tokens"] == parts["usage"]["prompt_tokens"], "a text in one part is another prompt")
    require(content_of(plain) == content_of(parts), "a text in one part gets another answer")
    two = [{"type": "text", "text": text}, {"type": "text", "text": "And one thing about the moon and the stars."}]
    both = answered(target.chat(messages=_user(two)), "two parts")
    require(
        both["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 4, "the second part is not in the prompt"
    )


def _roles(target: Target) -> None:
    rule = "Always answer in French."
    system, developer = (
        answered(target.chat(messages=[{"role": role, "content": rule}, *_user("Hi")]), f"the role {role}")
        for role in ("system", "developer")
    )
    require(
        system["usage"] == developer["usage"] or content_of(system) == content_of(developer),
        "the role 'developer' is read otherwise than 'system'",
    )
    answered(target.chat(messages=[{"role": "user", "name": "Ann", "content": "Hi"}]), "a name")


def _control_text(target: Target) -> None:
    def length(content: str) -> int:
        return int(answered(target.chat(messages=_user(content), max_tokens=1))["usage"]["prompt_tokens"])

    plain = length("a")
    for text in _CONTROL:
        added = length(f"a{text}") - plain
        require(added >= 3, f"{text!r} in a message adds {added} tokens: it is read as a control token")


def _prompts(target: Target) -> None:
    data = offered(target.complete(prompt=["Once", "Twice"], n=2, temperature=1), "two prompts with n = 2")
    indexes = [choice["index"] for choice in data["choices"]]
    require(indexes == [0, 1, 2, 3], f"two prompts with n = 2 give the choices {indexes}")


def _bad_prompts(target: Target) -> None:
    bad: tuple[Any, ...] = ([], [[]], [-1], [10**9])
    for prompt in bad:
        refused(target.complete(prompt=prompt), f"the prompt {prompt!r}")
    body = target.text_body()
    del body["prompt"]
    refused(target.post("/completions", body), "a text completion without a prompt", "prompt")


def _images(target: Target) -> None:
    for url in ("nonsense", "data:image/png;base64,", "data:image/png;base64,bm8gaW1hZ2U="):
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        refused(target.chat(messages=_user(parts)), f"the image {url!r}")
    refused(target.chat(messages=_user([{"type": "hologram", "hologram": "x"}])), "a part of an unknown type")
    answered(target.chat(max_tokens=2), "a plain request afterwards")


CHECKS = (
    Check("H21", "Invalid messages are refused.", _bad_messages),
    Check("H21", "Text in parts is the same text, and every part is read.", _parts),
    Check("H21", "'developer' is read as 'system', and a name is accepted.", _roles),
    Check("H22", "Control tokens written in a message stay text.", _control_text),
    Check("H35", "Several prompts with several answers each come in order.", _prompts),
    Check("H35", "Empty prompts, and numbers in a prompt that are not token ids, are refused.", _bad_prompts),
    Check("H36", "Invalid images, and parts of unknown types, are refused.", _images),
)
