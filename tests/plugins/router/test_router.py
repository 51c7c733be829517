"""The strategies: the contract of routers, what each decides, and how often they agree with 100 labelled prompts."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from enginehouse.cli import main
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.router import AnswerBeginning, Candidate, ChecksModels, RouteQuestion, Router
from enginehouse.contract.types import Constraint, GenerateRequest, Message, Tool, ToolUse
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse_router.features import WEIGHTS
from enginehouse_router.options import RouterOptions
from enginehouse_router.strategies import CascadeRouter, DifficultyRouter, LoadRouter, RulesRouter
from enginehouse_testkit.router_contract import RouterContract

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    {"model": "big", "code": True},
    {"model": "big", "min_chars": 120},
    {"model": "big", "contains": ["why", "explain", "prove", "compare", "design", "how would you"]},
]
"""Those of docs/routing.md."""


class TestContract(RouterContract):
    """Every strategy, with the options of the documentation."""

    @pytest.fixture(scope="class", params=["rules", "load", "difficulty", "cascade", "semantic"])
    @staticmethod
    def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Router:
        examples = tmp_path_factory.mktemp("examples") / "examples.jsonl"
        lines = [{"prompt": one["prompt"], "model": f"model-{number % 2}"} for number, one in enumerate(PROMPTS)]
        examples.write_text("\n".join(map(json.dumps, lines * 10)), encoding="utf-8")
        own = {"rules": RULES, "embedder": "e", "examples": str(examples)}
        settings = PluginsSettings(allow=("router",), options={"router": own})
        return PluginRegistry.load(settings).routers[request.param]


def request(text: str, **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", **{"model": "auto", "messages": (Message(role="user", content=text),), **changes}
    )


def candidates(*names: str, **changes: Any) -> tuple[Candidate, ...]:
    return tuple(evolve(Candidate(name=name, rank=rank, slots=4), **changes) for rank, name in enumerate(names))


def order(router: Router, asked: GenerateRequest, models: Sequence[Candidate]) -> list[str]:
    question = RouteQuestion(request=asked, candidates=tuple(models), default=models[0].name)
    return [attempt.model for attempt in router.route(question).attempts]


def accuracy(router: Router) -> float:
    models = candidates("small", "big")
    return sum(order(router, request(one["prompt"]), models)[0] == one["model"] for one in PROMPTS) / len(PROMPTS)


def options(**values: Any) -> RouterOptions:
    return structure_options(RouterOptions, values, "plugins.router")


def test_labelled_prompts_are_a_hundred_different_ones_half_of_each_kind() -> None:
    assert len({one["prompt"] for one in PROMPTS}) == 100
    assert sum(one["model"] == "small" for one in PROMPTS) == 50


def test_accuracy_of_each_strategy_on_the_labelled_prompts() -> None:
    """The figures of docs/routing.md, which says how they came about."""
    figures = {
        "rules": accuracy(RulesRouter(options(rules=RULES))),
        "difficulty": accuracy(DifficultyRouter()),
        "load": accuracy(LoadRouter()),
    }
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")

    assert figures["difficulty"] >= 0.9
    assert figures["rules"] >= 0.75
    assert figures["load"] == 0.5  # it does not look at prompts
    for name, figure in figures.items():
        assert f"| `{name}` | {figure:.0%} |" in page, name


@pytest.mark.parametrize(
    ("rule", "asked", "holds"),
    [
        ({"contains": ["Bash", "shell script"]}, request("Write a bash loop"), True),
        ({"contains": ["bash"]}, request("I was bashful"), False),
        ({"system_contains": ["lawyer"]}, request("Hi", messages=(Message(role="system", content="A lawyer."),)), True),
        ({"min_chars": 10, "max_chars": 20}, request("x" * 15), True),
        ({"min_chars": 10, "max_chars": 20}, request("x" * 21), False),
        ({"min_turns": 2}, request("a", messages=(Message(role="user", content="a"),) * 2), True),
        ({"min_turns": 2}, request("a"), False),
        ({"code": True}, request("def f(x):\n    return x"), True),
        ({"code": False}, request("How are you?"), True),
        ({"tools": True}, request("a", tool_use=ToolUse(tools=(Tool(name="f", parameters={}, definition={}),))), True),
        ({"tools": False}, request("a"), True),
        ({"structured": True}, request("a", constraint=Constraint(kind="regex", text="a")), True),
        ({"structured": True}, request("a"), False),
    ],
)
def test_rule_holds_when_all_that_it_says_does(rule: dict[str, Any], asked: GenerateRequest, holds: bool) -> None:
    router = RulesRouter(options(rules=[{"model": "big", **rule}]))

    assert order(router, asked, candidates("small", "big"))[0] == ("big" if holds else "small")


def test_first_rule_wins_and_rules_for_absent_models_are_passed_over() -> None:
    router = RulesRouter(options(rules=[{"model": "gone"}, {"model": "second"}, {"model": "third"}]))

    assert order(router, request("a"), candidates("first", "second", "third")) == ["second", "first", "third"]


def test_difficulty_divides_the_scale_among_the_models() -> None:
    three = candidates("s", "m", "l")
    hard = request("Prove and derive why both must hold; compare the proofs, without the theorem. Explain each step.")

    assert order(DifficultyRouter(), request("Hello"), three) == ["s", "m", "l"]
    assert order(DifficultyRouter(), hard, three) == ["l", "m", "s"]
    assert order(DifficultyRouter(options(thresholds=[0.0, 1.0])), request("Hello"), three) == ["m", "l", "s"]
    never = DifficultyRouter(options(weights={"reasoning": -50.0}))
    assert order(never, hard, three)[0] == "s"


def test_thresholds_hold_for_the_models_that_are_left() -> None:
    """A key may not use one of them, say: the parts of the others stay where the settings put them."""
    three = candidates("s", "m", "l")
    router = DifficultyRouter(options(thresholds=[0.001, 0.002]))  # all but the very easiest is for the large one

    assert order(router, request("Hello"), three) == ["l", "m", "s"]
    assert order(router, request("Hello"), (three[0], three[2])) == ["l", "s"]
    assert order(router, request("Hello"), three[:2]) == ["m", "s"]


@pytest.mark.parametrize(
    ("router", "problem"),
    [
        (RulesRouter(options(rules=[{"model": "s"}, {"model": "lagre"}])), r"rules\[1\]\.model: 'lagre'.*'large'"),
        (DifficultyRouter(options(thresholds=[0.2, 0.4])), r"thresholds: 2 models have 1 thresholds.*not 2"),
    ],
    ids=["rules", "difficulty"],
)
def test_settings_that_do_not_suit_the_models_are_refused(router: Any, problem: str) -> None:
    assert isinstance(router, ChecksModels)
    with pytest.raises(ConfigError, match=rf"plugins\.router\.{problem}"):
        router.check_models(("s", "large"))


def test_settings_that_suit_the_models_are_not() -> None:
    RulesRouter(options(rules=[{"model": "s"}])).check_models(("s", "large"))
    DifficultyRouter(options(thresholds=[0.2])).check_models(("s", "large"))
    DifficultyRouter().check_models(("s", "m", "large"))


def test_load_takes_who_has_most_room_then_who_answers_soonest() -> None:
    one, two, three = candidates("one", "two", "three")

    def first(*models: Candidate) -> str:
        return order(LoadRouter(), request("a"), models)[0]

    assert first(evolve(one, num_running=3), evolve(two, num_running=1), three) == "three"
    assert first(evolve(one, first_token_s=2.0), evolve(two, first_token_s=0.5)) == "two"
    assert first(evolve(one, state="unloaded"), evolve(two, num_running=4)) == "two"
    assert first(one, two) == "one"


def test_cascade_accepts_by_the_mean_probability() -> None:
    router = CascadeRouter(options(probe_tokens=2, min_probability=0.5))
    question = RouteQuestion(request=request("a"), candidates=candidates("s", "l"), default="s")
    accept = router.route(question).attempts[0].accept

    assert accept is not None
    assert accept.num_tokens == 2
    assert accept.is_good(AnswerBeginning("x", (-0.1, -1.0)))
    assert not accept.is_good(AnswerBeginning("x", (-0.1, -2.0)))
    assert not accept.is_good(AnswerBeginning("x", ()))


@pytest.mark.parametrize(
    "values",
    [
        {"weights": {"lenght": 1.0}},
        {"thresholds": [0.6, 0.4]},
        {"thresholds": [1.5]},
        {"probe_tokens": 17},
        {"min_probability": 2},
        {"rules": [{"contains": ["x"]}]},
        {"rules": [{"model": "m", "containz": []}]},
        {"rule": []},
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.router"):
        options(**values)


# -- calibration -----------------------------------------------------------------------------------


def calibrate(tmp_path: Path, lines: Sequence[Any], models: str = "small,big") -> Result:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return CliRunner().invoke(main, ["calibrate", "router", str(log), "--models", models], catch_exceptions=False)


def agreement(router: Router, lines: Sequence[dict[str, Any]]) -> float:
    hits = [order(router, request(one["prompt"]), candidates("small", "big"))[0] == one["model"] for one in lines]
    return sum(hits) / len(hits)


def test_calibration_prints_settings_that_agree_with_the_log(tmp_path: Path) -> None:
    """Labels that contradict the built-in weights: here what asks for reasons is easy, and what has code is hard."""
    lines = [
        {"prompt": f"{text} (case {number})", "model": model}
        for text, model in (("Explain why and compare the proofs", "small"), ("print() prints nothing", "big"))
        for number in range(20)
    ]
    result = calibrate(tmp_path, lines)
    settings = tomllib.loads(result.stdout)
    learnt = DifficultyRouter(options(**settings["plugins"]["router"]))

    assert result.exit_code == 0
    assert settings["router"] == {"strategy": "difficulty", "models": ["small", "big"]}
    assert agreement(DifficultyRouter(), lines) <= 0.5
    assert agreement(learnt, lines) >= 0.95


def test_calibration_on_the_labelled_prompts_holds_on_those_left_out(tmp_path: Path) -> None:
    shares = [int(share) for share in re.findall(r"(\d+)%", calibrate(tmp_path, PROMPTS).output)]

    assert shares[0] == 96
    assert shares[1] >= 88


def test_calibration_of_three_models_finds_two_thresholds(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": one["prompt"]}], "model": one["model"]} for one in PROMPTS]
    parts = [{"type": "text", "text": "Compare tea and coffee, briefly."}]
    middle = {"messages": [{"role": "user", "content": parts}], "model": "middle"}
    settings = tomllib.loads(calibrate(tmp_path, chats + [middle] * 20, "small,middle,big").stdout)
    low, high = settings["plugins"]["router"]["thresholds"]

    assert 0 < low < high < 1
    assert set(settings["plugins"]["router"]["weights"]) == set(WEIGHTS)


@pytest.mark.parametrize(
    ("lines", "models", "message"),
    [
        (PROMPTS[:5], "small,big", "5 prompts are too few"),
        (
            [*PROMPTS, {"prompt": "x", "model": "huge"}],
            "small,big",
            "line 101: the model 'huge' is not one of small",
        ),
        (["{"], "small,big", "line 1: "),
        ([{"model": "small"}], "small,big", "line 1: either prompt or messages"),
        ([[]], "small,big", "line 1: "),
        (PROMPTS, "small", "needs 2 to 4 different names"),
        (PROMPTS, "small,small", "needs 2 to 4 different names"),
    ],
)
def test_logs_that_cannot_be_learnt_from_are_refused(
    tmp_path: Path, lines: Sequence[Any], models: str, message: str
) -> None:
    result = calibrate(tmp_path, lines, models)

    assert result.exit_code in (1, 2)
    assert message in result.output
