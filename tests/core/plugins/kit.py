"""A plugin of the kinds that few plugins have: an engine, a structured decoder, an exit policy, a reasoning parser.

``test_kit`` installs it as the distribution ``kit``; it imports the contract only, and the test kit where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from attrs import frozen

from enginehouse import hookimpl
from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Tokenizer
from enginehouse.contract.commands import Command
from enginehouse.contract.errors import GenerationFailed, InvalidRequest, ModelLoadError
from enginehouse.contract.parsers import AnswerText, ChatFormat, ReasoningText
from enginehouse.contract.types import Constraint


@frozen
class NoOptions:
    """No settings."""


class KitBackend:
    """Opens an engine of its own: the fake model behind core's engine, on the server's event loop."""

    name, api_version, options, opens = "kit", 1, NoOptions, "engine"

    def probe(self) -> Probe:
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        is_ours = source.path is not None and source.path.suffix == ".kit" and source.path.is_file()
        return Match(0.9, "a .kit file") if is_ours else Match(0.0, "not a .kit file")

    def estimate(self, source: ModelSource, options: NoOptions) -> MemoryEstimate:
        return MemoryEstimate(1000, 0, 1000)

    def open(self, source: ModelSource, options: NoOptions, progress: Any) -> Any:
        from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
        from enginehouse_testkit.inline_engine import InlineEngine

        if source.path is None or not source.path.is_file() or source.path.read_bytes() != b"kit":
            raise ModelLoadError(f"{source.text} is not a .kit file")
        progress(1.0, "ready")
        engine = InlineEngine(FakeRunner(FakeOptions(context=512, slots=4)))
        engine.info = msgspec.structs.replace(engine.info, backend="kit")
        return engine


class Choices:
    """Enforces ``choice``: texts that the answer must be one of. One matcher, and its own grammar."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes], done: bytes = b"") -> None:
        self.tokenizer, self.texts, self.done = tokenizer, texts, done

    def start(self) -> Choices:
        return Choices(self.tokenizer, self.texts)

    def allowed(self) -> list[int]:
        rest = [text[len(self.done) :] for text in self.texts if text.startswith(self.done)]
        hidden = self.tokenizer.control_token_ids
        pieces = enumerate(self.tokenizer.token_bytes)
        found = [
            token_id
            for token_id, piece in pieces
            if piece and token_id not in hidden and any(text.startswith(piece) for text in rest)
        ]
        return found + (list(self.tokenizer.end_token_ids) if b"" in rest else [])

    def fill_bitmask(self, bitmask: Any) -> None:
        bits = np.zeros(bitmask.size * 32, np.uint8)
        bits[self.allowed()] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed():
            raise GenerationFailed(f"the token {token_id} is not allowed here", "kit")
        if token_id not in self.tokenizer.end_token_ids:
            self.done += self.tokenizer.token_bytes[token_id]

    def forced_token_ids(self) -> Sequence[int]:
        return ()

    def is_finished(self) -> bool:
        return set(self.allowed()) <= set(self.tokenizer.end_token_ids)


class ChoiceCompiler:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def compile(self, constraint: Constraint) -> Choices:
        texts = json.loads(constraint.text)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{constraint.param}: must be a list of texts", constraint.param)
        return Choices(self.tokenizer, [text.encode() for text in texts])


class ChoiceDecoder:
    name, api_version, kinds = "kit-choices", 1, frozenset({"choice"})

    def bind(self, tokenizer: Tokenizer) -> ChoiceCompiler:
        return ChoiceCompiler(tokenizer)


class HalfWay:
    """Asked after half of the layers: a token exits where one logit is far above the others."""

    name, api_version, options = "kit-half", 1, NoOptions

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers

    def bind(self, context: Any, options: NoOptions) -> HalfWay:
        return HalfWay((context.exit_layers[len(context.exit_layers) // 2],))

    def leaves(self, view: Any) -> Any:
        best = np.sort(np.asarray(view.logits()), axis=1)[:, -2:]
        return np.nan_to_num(best[:, 1] - best[:, 0], nan=0.0, posinf=1e9) > 3.0


class Plan:
    """Reasoning between ``<plan>`` and ``</plan>`` at the beginning of an answer."""

    name, api_version = "kit-plan", 1
    start, end, has_switch = "<plan>", "</plan>", False

    def match(self, model: ChatFormat) -> float:
        return 0.9 if self.start in model.template else 0.0

    def bind(self, model: ChatFormat) -> Plan:
        return self

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        return {}

    def is_open(self, prompt: str) -> bool:
        return prompt.endswith(self.start)

    def open(self, is_open: bool) -> PlanSession:
        return PlanSession("reasoning" if is_open else "start")


class PlanSession:
    def __init__(self, state: str) -> None:
        self.state, self.held = state, ""

    def push(self, text: str) -> list[Any]:
        self.held += text
        parts: list[Any] = []
        if self.state == "start" and self.held.startswith(Plan.start):
            self.held, self.state = self.held.removeprefix(Plan.start), "reasoning"
        elif self.state == "start" and not Plan.start.startswith(self.held):
            self.state = "answer"
        if self.state == "reasoning":
            parts += self.reasoning()
        if self.state == "answer" and self.held:
            parts.append(AnswerText(self.held))
            self.held = ""
        return parts

    def reasoning(self) -> list[Any]:
        text, found, after = self.held.partition(Plan.end)
        if found:
            self.held, self.state = after, "answer"
        else:
            size = next(size for size in range(len(Plan.end), -1, -1) if text.endswith(Plan.end[:size]))
            text, self.held = text[: len(text) - size], Plan.end[:size]
        return [ReasoningText(text)] if text else []

    def flush(self, is_cut: bool) -> list[Any]:
        held, self.held = self.held, ""
        if not held or (self.state == "reasoning" and is_cut and len(held) > 1):
            return []
        return [ReasoningText(held) if self.state == "reasoning" else AnswerText(held)]


@hookimpl
def register_backends(register: Any) -> None:
    register(KitBackend())


@hookimpl
def register_structured_decoders(register: Any) -> None:
    register(ChoiceDecoder())


@hookimpl
def register_exit_policies(register: Any) -> None:
    register(HalfWay())


@hookimpl
def register_reasoning_parsers(register: Any) -> None:
    register(Plan())


@hookimpl
def register_commands(register: Any) -> None:
    register(Command("kit greet", "kit_command:greet", "Say hello."))
