"""Forty prompts on which optimisations must not change a word, and the ways to serve them.

The prompts are chats, edits, JSON, documents and conversations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import field, frozen

__all__ = ["PROMPTS", "WAYS", "Prompt", "one_model_in_all_ways"]

WAYS = {
    "plain": "prefix_cache = false\ndrafters = []",
    "cached": "drafters = []",
    "lookup": 'drafters = ["prediction", "prompt-lookup"]',
    "second": 'drafters = [{ name = "draft-model", source = "MODEL", max_tokens = 4 }]',
    "layers": 'drafters = [{ name = "layers", num_layers = 28, min_probability = 0.0, max_tokens = 4 }]',
}
"""Settings of a model by name. SmolLM2 has 30 layers."""


def one_model_in_all_ways(model: Path, settings: str) -> str:
    """A configuration that has the model once for each of :data:`WAYS`, with ``settings``, lines of TOML, in all."""
    generic = f'source = "MODEL"\ncontext = 4096\n{settings}'
    tables = [f"[models.{name}]\n{generic}{way}\n".replace("MODEL", str(model)) for name, way in WAYS.items()]
    return "\n".join(tables)


_CODE = '''class Account:
    """A bank account."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
'''
_PARAGRAPHS = (
    "The harbour of {place} was built in {year} by a company of {number} masons, who were paid in salt and cloth.",
    "Every spring the ships of {place} leave for the north, and half of the town stands on the pier to see them go.",
    "In {year} a storm took the roof of the customs house; it was found {number} days later in a field of barley.",
    "The mayor of {place} keeps {number} bees and one goat, which is allowed to attend the meetings of the council.",
    "Visitors are told that the lighthouse of {place} has {number} steps, but nobody agrees where to begin counting.",
)
_TOPICS = (
    "why the sea is salty",
    "how to mend a bicycle tyre",
    "what a good breakfast is",
    "how a lighthouse works",
    "why leaves turn red",
    "how to learn the names of birds",
    "what makes bread rise",
    "how old maps were drawn",
)
_EDITS = (
    ("deposit", "pay_in"),
    ("withdraw", "pay_out"),
    ("balance", "amount_left"),
    ("owner", "holder"),
    ("Account", "Purse"),
    ("amount", "sum"),
    ("ValueError", "MoneyError"),
    ("positive", "above zero"),
)
_PLACES = ("Varna", "Kirkwall", "Bergen", "Odessa", "Cadiz", "Porto", "Turku", "Split")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["town", "river", "mountain", "person"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 900},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


@frozen
class Prompt:
    """One request: its messages and further fields of its body."""

    name: str
    messages: list[dict[str, str]]
    fields: dict[str, Any] = field(factory=dict)

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """The body of a chat request at temperature 0."""
        return {"model": model, "messages": self.messages, "temperature": 0, "max_tokens": max_tokens, **self.fields}


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _document(place: str, number: int) -> str:
    lines = [
        _PARAGRAPHS[index % 5].format(place=place, year=1500 + 7 * index + number, number=3 + index + number)
        for index in range(60)
    ]
    return " ".join(lines)


def _edit(number: int) -> Prompt:
    old, new = _EDITS[number]
    text = f"Repeat this code, but rename {old} to {new}:\n\n```python\n{_CODE}```"
    prediction = {"type": "content", "content": f"```python\n{_CODE.replace(old, new)}```"}
    return Prompt(f"edit {number}", _user(text), {"prediction": prediction})


def _conversation(number: int) -> Prompt:
    messages = _user(f"Tell me {_TOPICS[number]}.")
    for turn in range(3):
        messages.append(
            {"role": "assistant", "content": f"{_PARAGRAPHS[turn].format(place='Rome', year=1600, number=9)}"}
        )
        messages.append({"role": "user", "content": f"And what about {_TOPICS[(number + turn + 1) % 8]}?"})
    return Prompt(f"conversation {number}", messages)


_FORM = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": _SCHEMA}}
PROMPTS: tuple[Prompt, ...] = (
    *(Prompt(f"chat {number}", _user(f"Explain {topic}.")) for number, topic in enumerate(_TOPICS)),
    *(_edit(number) for number in range(8)),
    *(
        Prompt(f"json {number}", _user(f"Describe {place} as JSON."), {"response_format": _FORM})
        for number, place in enumerate(_PLACES)
    ),
    *(
        Prompt(f"document {number}", _user(f"{_document(place, number)}\n\nRepeat the sentences about bees."))
        for number, place in enumerate(_PLACES)
    ),
    *(_conversation(number) for number in range(8)),
)
"""Eight of each kind."""
