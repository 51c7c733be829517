"""The pipeline without HTTP: names, effective parameters, prompts, refusals."""

import contextlib
from pathlib import Path

import pytest

from enginehouse.contract.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    RenderError,
)
from enginehouse.contract.types import GenerateRequest, Message, TextDelta
from enginehouse.pipeline.parameters import Defaults, Layer, effective_parameters, read_defaults
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script

MESSAGES = (Message(role="user", content="hi"),)


def request(**fields) -> GenerateRequest:
    return GenerateRequest(request_id="r", **{"model": None, "messages": MESSAGES, **fields})


@contextlib.asynccontextmanager
async def opened(folder: Path, **model):
    source = write_script(folder / "script.json", ["Hel", "lo"])
    settings = Settings(
        models={"m": ModelSettings(source=source, backend="scripted", aliases=("n",), **model)},
        limits=LimitsSettings(render_timeout_s=20),
        plugins=PluginsSettings(allow=()),
    )
    registry = PluginRegistry.for_settings(settings)
    manager, renderer = ModelManager(settings, registry), Renderer(20, 10_000)
    pipeline = Pipeline(settings, registry, manager, renderer)
    manager.check_with(pipeline.check_model)
    await renderer.start()
    await manager.start()
    await manager.wait_settled(20)
    try:
        yield pipeline
    finally:
        await manager.close()
        await renderer.close()


async def test_a_chat_goes_all_the_way(tmp_path: Path) -> None:
    async with opened(tmp_path) as pipeline:
        running = await pipeline.start(request(model="n"))
        events = [event async for batch in running.generation for event in batch]

    assert running.model.name == "m"
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Hello"
    assert running.generation.num_prompt_tokens == len("User: hi\nAssistant:")


async def test_a_model_s_own_template_file_is_used(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}", encoding="utf-8")
    async with opened(tmp_path, chat_template=str(template)) as pipeline:
        running = await pipeline.start(request())

        assert running.generation.num_prompt_tokens == len("[hi]")
        running.generation.cancel()


async def test_a_template_that_cannot_be_compiled_fails_the_load(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("line one\n{% for m in messages %}never closed", encoding="utf-8")
    async with opened(tmp_path, chat_template=str(template)) as pipeline:
        with pytest.raises(ModelLoadError, match="chat template 'chat_template' is broken"):
            await pipeline.start(request())


async def test_raw_prompts_are_not_rendered(tmp_path: Path) -> None:
    async with opened(tmp_path) as pipeline:
        for fields, num_tokens in (({"text": "abc"}, 3), ({"token_ids": (1, 2)}, 2)):
            running = await pipeline.start(request(messages=None, **fields))
            assert running.generation.num_prompt_tokens == num_tokens
            running.generation.cancel()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('never') }}", "refused the messages (line 1): never"),
        ("{% for tool in functions.all %}{% endfor %}", "needs the variable 'functions'"),
        ("{{ tools | length }}{{ messages[0].content }}", None),
        ("{{ messages[0].content if messages[0].role == 'system' else raise_exception('no system message') }}", None),
    ],
)
async def test_a_template_that_no_chat_can_use_is_told_when_its_model_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, said: str | None
) -> None:
    (tmp_path / "template.jinja").write_text(template, encoding="utf-8")
    async with opened(tmp_path, chat_template=str(tmp_path / "template.jinja")) as pipeline:
        running = await pipeline.start(request(messages=None, text="abc"))
        running.generation.cancel()
    told = [record.message for record in caplog.records if "no chat can use its chat template" in record.message]

    assert [said in message and message.startswith("models.m: ") for message in told if said] == [True] * len(told)
    assert len(told) == (said is not None)


async def test_refusals(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('no ' + messages[0].content) }}", encoding="utf-8")
    async with opened(tmp_path, context=10, chat_template=str(template)) as pipeline:
        with pytest.raises(ModelNotFound):
            await pipeline.start(request(model="other"))
        with pytest.raises(RenderError, match="no hi"):
            await pipeline.start(request())
        with pytest.raises(ContextLengthExceeded):
            await pipeline.start(request(messages=None, text="12345678901"))
        for token_ids in ((), (5, -1), (258,)):
            with pytest.raises(InvalidRequest):
                await pipeline.start(request(messages=None, token_ids=token_ids))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"defaults": {"temperature": 5}}, "models.m.defaults.temperature"),
        ({"defaults": {"temprature": 1}}, "models.m.defaults.temprature"),
        ({"defaults": {"stop": ""}}, "models.m.defaults.stop"),
        ({"defaults": {"logit_bias": {"x": 1}}}, "models.m.defaults.logit_bias"),
        (
            {"aliases": ("n",), "alias_defaults": {"n": {"temperature": 5}}},
            "models.m.alias_defaults.n.temperature",
        ),
        ({"chat_template": "/nowhere/template.jinja"}, "models.m.chat_template"),
    ],
)
def test_wrong_settings_are_found_at_the_start(tmp_path: Path, model, path: str) -> None:
    source = write_script(tmp_path / "script.json", ["a"])
    settings = Settings(
        models={"m": ModelSettings(source=source, backend="scripted", **model)}, plugins=PluginsSettings(allow=())
    )
    registry = PluginRegistry.for_settings(settings)

    with pytest.raises(ConfigError) as caught:
        Pipeline(settings, registry, ModelManager(settings, registry), Renderer(1, 1))
    assert caught.value.path == path


# -- effective parameters -----------------------------------------------------------------------------

LIMITS = LimitsSettings(max_tokens=50)


def layer(origin: str, **fields: object) -> Layer:
    """A layer of defaults."""
    return Layer(origin, read_defaults(fields, "d", {}))  # type: ignore[arg-type]  # any origin


def test_request_wins_over_layers_over_built_in() -> None:
    """The rule: request, alias, model, generation config, profile, built-in; each value says where it is from."""
    layers = (
        layer("alias", top_p=0.1),
        layer("model", top_p=0.2, top_k=7, stop="x"),
        layer("generation_config", top_k=8, min_p=0.25, temperature=0.6),
        layer("profile", min_p=0.5, temperature=0.7, max_tokens=9),
    )
    found = effective_parameters(
        request(sampling={"temperature": 0.1}, stopping={"stop": ("a", "b")}), layers, 10, LIMITS
    )

    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.1, 0.1, 7, 0.25)
    assert (found.stopping.max_tokens, found.stopping.stop) == (9, ("a", "b"))
    wanted = {
        "temperature": "request",
        "stop": "request",
        "top_p": "alias",
        "top_k": "model",
        "min_p": "generation_config",
        "max_tokens": "profile",
        "repetition_penalty": "built-in",
        "seed": "drawn",
    }
    assert {name: found.origins[name] for name in wanted} == wanted


def test_defaults_over_the_limit_of_the_server_are_cut() -> None:
    found = effective_parameters(request(), [layer("profile", max_tokens=32768)], 10, LIMITS)

    assert (found.stopping.max_tokens, found.origins["max_tokens"]) == (50, "limits")


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {effective_parameters(request(), (), 10, LIMITS).sampling.seed for _ in range(20)}

    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert effective_parameters(request(sampling={"seed": -5}), (), 10, LIMITS).sampling.seed == -5


def test_token_limit_of_the_server() -> None:
    assert effective_parameters(request(), (), 10, LIMITS).stopping.max_tokens == 50
    with pytest.raises(InvalidRequest, match="at most 50"):
        effective_parameters(request(stopping={"max_tokens": 51}), (), 10, LIMITS)


def test_logit_bias_keys_are_token_ids() -> None:
    found = effective_parameters(request(sampling={"logit_bias": {"3": 1, "9": -100}}), (), 10, LIMITS)
    assert found.sampling.logit_bias == {3: 1.0, 9: -100.0}

    with pytest.raises(InvalidRequest) as caught:
        effective_parameters(request(sampling={"logit_bias": {"10": 1, "x": 2, "3": 1}}), (), 10, LIMITS)
    assert "'10'" in caught.value.message and "'x'" in caught.value.message and "'3'" not in caught.value.message


@pytest.mark.parametrize("other", ["03", "+3", "3.0", " 3", "٣"])
def test_logit_bias_of_one_token_has_one_spelling(other: str) -> None:
    """Else two values for one token could be given, and one of them would be dropped."""
    with pytest.raises(InvalidRequest, match="logit_bias: keys must be token ids"):
        effective_parameters(request(sampling={"logit_bias": {"3": 1, other: -100}}), (), 10, LIMITS)


def test_plugin_fields_merge_by_field() -> None:
    defaults = Defaults(extensions={"xtc": {"a": 1, "b": 2}})
    given = request(extensions={"xtc": {"b": 3}, "typ": {"c": 4}})
    found = effective_parameters(given, [Layer("model", defaults)], 10, LIMITS)

    assert found.sampling.extensions == {"xtc": {"a": 1, "b": 3}, "typ": {"c": 4}}
    assert {name: found.origins[name] for name in "abc"} == {"a": "model", "b": "request", "c": "request"}
