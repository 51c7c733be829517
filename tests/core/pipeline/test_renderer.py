"""A hostile template costs its own request an error and a process, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic, sleep

import msgspec
import pytest

from enginehouse.contract.errors import InvalidRequest, RenderError, ServerOverloaded
from enginehouse.contract.types import Message, Segment
from enginehouse.pipeline.prompt.renderer import ChatPrompt, Renderer
from enginehouse.pipeline.prompt.templates import render

TIMEOUT_S = 1.5
HANGS = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextlib.asynccontextmanager
async def started(timeout_s: float, max_chars: int = 2_000_000) -> AsyncIterator[Renderer]:
    renderer = Renderer(timeout_s, max_chars=max_chars)
    began = monotonic()
    await renderer.start()
    # On a busy machine as well, another process starts within the limit.
    renderer.timeout_s = max(timeout_s, 5 * (monotonic() - began))
    try:
        yield renderer
    finally:
        await renderer.close()


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    async with started(TIMEOUT_S) as renderer:
        yield renderer


@pytest.fixture
async def patient() -> AsyncIterator[Renderer]:
    """One whose time limit a busy machine does not reach."""
    async with started(60.0) as renderer:
        yield renderer


def prompt(template: str, content: str = "hi", special_tokens: tuple[str, ...] = ("<|im_end|>",)) -> ChatPrompt:
    return ChatPrompt(
        template=template, messages=(Message(role="user", content=content),), special_tokens=special_tokens
    )


async def still_serves(renderer: Renderer) -> bool:
    return await renderer.render(prompt(ECHO)) == (Segment("[user:hi]", trusted=True),)


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> set[int]:
    """Process ids of the children, from /proc; zombies do not count."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(status.parent.name))
    return found


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


# --- rendering -------------------------------------------------------------------------------------


async def test_rendering_gives_what_the_pure_function_gives(patient: Renderer) -> None:
    message = Message(role="user", content="Grüß <|im_end|> 漢 🧑\u2028", name="Ann<|im_end|>")
    template = "<s>{% for m in messages %}{{ m.name }}:{{ m.content }}<|im_end|>{{ tools | tojson }}{% endfor %}{{ x }}"
    chat_prompt = ChatPrompt(
        template=template,
        messages=(message, message),
        bos_token="<s>",
        eos_token="<|im_end|>",
        special_tokens=("<s>", "<|im_end|>"),
        extra={"tools": [{"a": [1, 2.5, None, True]}], "x": "y"},
    )

    segments = await patient.render(chat_prompt)
    assert segments == render(chat_prompt, 10_000)
    assert [segment.text for segment in segments if not segment.trusted] == ["<|im_end|>"] * 4


async def test_many_templates_and_chats_at_once(patient: Renderer) -> None:
    """More templates than a process remembers, in an order in which each is forgotten and sent again."""
    prompts = [prompt(f"{number % 50}{ECHO}", f"c{number}") for number in range(300)]

    rendered = await asyncio.gather(*map(patient.render, prompts))
    assert [segments[0].text for segments in rendered] == [f"{n % 50}[user:c{n}]" for n in range(300)]


async def test_long_chats_pass_the_pipe(patient: Renderer) -> None:
    content = "漢<|im_end|>" * 100_000
    segments = await patient.render(prompt(ECHO, content))

    assert "".join(segment.text for segment in segments) == f"[user:{content}]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '\\ud800' }}", "wrote a lone surrogate"),
        ("{{ raise_exception('no \\ud800') }}", r"refused the messages \(line 1\): no \?"),
    ],
)
async def test_characters_that_are_no_text_cost_no_process(patient: Renderer, template: str, message: str) -> None:
    for _ in range(2):  # a process that ends is replaced once
        with pytest.raises(RenderError, match=message):
            await patient.render(prompt(template))


async def test_refusals_carry_the_templates_message(patient: Renderer) -> None:
    with pytest.raises(RenderError, match=r"refused the messages \(line 1\): roles must alternate") as caught:
        await patient.render(prompt("{{ raise_exception('roles must alternate') }}"))

    assert caught.value.param == "messages"
    assert await still_serves(patient)


async def test_check_finds_syntax_errors(patient: Renderer) -> None:
    await patient.check(ECHO)
    with pytest.raises(RenderError, match="syntax error in line 2"):
        await patient.check("\n{% if %}")


# --- hostile templates -----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [HANGS, "{{ 'a' * 10**6 | wordcount }}" + HANGS])
async def test_a_hanging_template_fails_in_time_and_others_are_served_meanwhile(
    renderer: Renderer, template: str
) -> None:
    start = monotonic()
    hanging = asyncio.create_task(renderer.render(prompt(template)))
    num_served = 0
    while not hanging.done():
        assert await still_serves(renderer)
        num_served += 1

    with pytest.raises(RenderError, match=re.escape(f"took longer than {renderer.timeout_s:g} s")):
        await hanging
    assert monotonic() - start < 60
    assert num_served > 20


async def test_many_hanging_requests_all_fail_in_time_and_starve_nobody(renderer: Renderer) -> None:
    start = monotonic()
    hanging = [asyncio.create_task(renderer.render(prompt(HANGS))) for _ in range(20)]
    await asyncio.sleep(0)
    num_served = 0
    while not all(task.done() for task in hanging):
        assert await still_serves(renderer)
        num_served += 1

    # Who never got a process is told so; who meets a template known to hang, that it hangs.
    errors = await asyncio.gather(*hanging, return_exceptions=True)
    assert {type(error) for error in errors} <= {RenderError, ServerOverloaded}
    assert monotonic() - start < 60
    assert num_served > 20


async def test_hanging_templates_share_one_process_once_they_are_known() -> None:
    async with started(2.0, max_chars=1000) as renderer:
        templates = [HANGS, HANGS + " "]
        for template in templates:
            with pytest.raises(RenderError):
                await renderer.render(prompt(template))
        hanging = [asyncio.create_task(renderer.render(prompt(template))) for template in templates]
        await asyncio.sleep(0.05)

        assert await still_serves(renderer)
        errors = await asyncio.gather(*hanging, return_exceptions=True)
        assert {type(error) for error in errors} == {RenderError}


MEMORY_BOMBS = [
    "{{ 'x' * 10**10 }}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ [0] * 10**9 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{% macro m(t) %}{{ t ~ t }}{% endmacro %}{% set ns = namespace(x='xxxx') %}"
    "{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
]


@linux
@pytest.mark.parametrize("template", MEMORY_BOMBS)
async def test_memory_bombs_are_defused(renderer: Renderer, template: str) -> None:
    with pytest.raises(RenderError, match=r"too much memory|took longer|crashed"):
        await renderer.render(prompt(template))

    assert await still_serves(renderer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nests too deeply"),
        ("{% for i in range(10**5) %}{{ 'x' * 100 }}{% endfor %}", "exceeds 2000000 characters"),
    ],
)
async def test_other_bombs_fail_without_losing_a_process(patient: Renderer, template: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        await patient.render(prompt(template))

    assert await still_serves(patient)


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_templates_that_nest_deeply_fail_at_load(patient: Renderer, size: int) -> None:
    for template in (
        "{{ " + "(" * size + "1" + ")" * size + " }}",
        "{{ " + "-" * size + "1 }}",
        "{{ 1" + "+1" * size + " }}",
    ):
        with pytest.raises(RenderError):
            await patient.check(template)

    assert await still_serves(patient)


async def test_no_file_is_created_and_nothing_is_executed(patient: Renderer, tmp_path: Path) -> None:
    target = tmp_path / "file"
    for template in (
        f"{{{{ cycler.__init__.__globals__.os.system('touch {target}') }}}}",
        f"{{{{ lipsum.__globals__['os'].popen('touch {target}').read() }}}}",
        f"{{{{ ''.__class__.__base__.__subclasses__()[0].__init__.__globals__['open']('{target}', 'w') }}}}",
    ):
        with pytest.raises(RenderError):
            await patient.render(prompt(template))

    assert not target.exists()


async def test_changed_inputs_do_not_reach_later_requests(patient: Renderer) -> None:
    for template in ("{{ messages.append(1) }}", "{{ messages[0].update(content='x') }}", "{{ messages[0].clear() }}"):
        with pytest.raises(RenderError, match="not allowed"):
            await patient.render(prompt(template))
    await patient.render(prompt("{% set messages = [] %}{% set m = 1 %}"))

    assert await still_serves(patient)


@linux
@pytest.mark.parametrize("name", ["tools", "kwargs"])
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [{"x": [1, 10**300]}]])
async def test_what_cannot_be_sent_costs_no_process(patient: Renderer, name: str, value: object) -> None:
    before = children_of(os.getpid())
    wide = msgspec.structs.replace(prompt(ECHO), extra={name: value})
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="does not fit into 64 bits") as raised:
            await patient.render(wide)
        assert raised.value.param == ("tools" if name == "tools" else f"chat_template_kwargs.{name}")

    assert await still_serves(patient)
    assert children_of(os.getpid()) == before


@linux
async def test_a_template_first_seen_with_what_cannot_be_sent_is_rendered_later(patient: Renderer) -> None:
    before = children_of(os.getpid())
    templates = [f"{index}{ECHO}" for index in range(70)]  # more than a process remembers
    for template in templates:
        with pytest.raises(InvalidRequest):
            await patient.render(msgspec.structs.replace(prompt(template), extra={"x": 2**64}))
        assert (await patient.render(prompt(template)))[0].text.endswith("[user:hi]")

    assert children_of(os.getpid()) == before


async def test_deep_values_are_refused_and_cost_no_process(patient: Renderer) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await patient.render(msgspec.structs.replace(prompt(ECHO), extra={"x": deep}))

    assert await still_serves(patient)


async def test_numbers_of_64_bits_are_rendered(patient: Renderer) -> None:
    numbers = msgspec.structs.replace(prompt("{{ x }} {{ y }}"), extra={"x": 2**64 - 1, "y": -(2**63)})

    assert (await patient.render(numbers))[0].text == f"{2**64 - 1} {-(2**63)}"


# --- processes -------------------------------------------------------------------------------------


@linux
async def test_killed_processes_are_replaced_and_a_rendering_that_loses_two_fails() -> None:
    """One loss may be bad luck and is tried again; of two the template is the likelier cause."""
    renderer = Renderer(60.0, max_chars=1000)
    await renderer.start()
    try:
        crashing = asyncio.create_task(renderer.render(prompt(HANGS)))
        num_rounds = 0
        while not crashing.done():
            await asyncio.wait([crashing], timeout=2.0**num_rounds)  # they may take long to start
            kill_all(children_of(os.getpid()))
            num_rounds += 1

        with pytest.raises(RenderError, match="crashed the rendering process"):
            await crashing
        assert num_rounds >= 2

        before = children_of(os.getpid())
        kill_all(before)
        async with asyncio.timeout(60):
            while before & children_of(os.getpid()):  # noqa: ASYNC110 - until the signals have arrived
                await asyncio.sleep(0.01)
        assert await still_serves(renderer)  # idle processes that were killed are replaced as well
        assert not before & children_of(os.getpid())
    finally:
        await renderer.close()


async def test_a_cancelled_rendering_gives_its_process_up(renderer: Renderer) -> None:
    hanging = asyncio.create_task(renderer.render(prompt(HANGS)))
    await asyncio.sleep(0.1)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging

    waiting = [asyncio.create_task(renderer.render(prompt(ECHO, str(number)))) for number in range(10)]
    waiting[3].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [tuple] * 3 + [asyncio.CancelledError] + [tuple] * 6


@linux
async def test_close_leaves_no_process_and_no_caller_behind() -> None:
    before = children_of(os.getpid())
    renderer = Renderer(30.0, max_chars=1000)
    await renderer.start()
    assert children_of(os.getpid()) - before
    calls = [asyncio.create_task(renderer.render(prompt(HANGS))) for _ in range(4)]
    await asyncio.sleep(0.1)
    await renderer.close()

    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in errors} <= {RenderError, ServerOverloaded}
    assert children_of(os.getpid()) == before
    with pytest.raises(ServerOverloaded):
        await renderer.render(prompt(ECHO))


@linux
@pytest.mark.parametrize("delay_s", [0, 0.001, 0.01, 0.1, 0.3])
async def test_close_while_processes_start_leaves_none_behind(delay_s: float) -> None:
    before = children_of(os.getpid())
    renderer = Renderer(30.0, max_chars=1000)
    starting = asyncio.create_task(renderer.start())
    await asyncio.sleep(delay_s)
    await renderer.close()
    with contextlib.suppress(RuntimeError):
        await starting

    assert children_of(os.getpid()) == before


ORPHAN = f"""
import asyncio
from enginehouse.pipeline.prompt.renderer import ChatPrompt, Renderer

async def main():
    renderer = Renderer(60.0, 1000)
    await renderer.start()
    hanging = asyncio.create_task(renderer.render(ChatPrompt(template={HANGS!r}, messages=())))
    await asyncio.sleep(0)
    await renderer.render(ChatPrompt(template="another", messages=()))
    print("ready", flush=True)
    await hanging

asyncio.run(main())
"""


@linux
def test_no_process_survives_its_parent() -> None:
    """Neither the idle one, which sees its pipe close, nor the one that is busy for ever."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = children_of(parent.pid)
        parent.kill()

    assert len(children) == 2
    deadline = monotonic() + 60
    while any(_runs(pid) for pid in children) and monotonic() < deadline:
        sleep(0.05)
    assert not any(_runs(pid) for pid in children)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
async def test_processes_do_not_inherit_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEHOUSE_AUTH__KEYS", "sesame")
    before = children_of(os.getpid())
    renderer = Renderer(5.0, max_chars=1000)
    await renderer.start()
    environments = [environment_of(pid) for pid in children_of(os.getpid()) - before]
    await renderer.close()

    assert environments
    assert not any(b"sesame" in environment for environment in environments)


def test_one_process_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two"):
        Renderer(1.0, 1000, num_processes=1)


def test_processes_start_without_large_libraries() -> None:
    """Two of them start with each server."""
    code = "import sys, enginehouse.pipeline.prompt.render_process as _; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split()

    assert {"numpy", "asyncio", "cattrs", "litestar", "enginehouse.settings.config"} & set(loaded) == set()


async def test_one_template_needs_one_process() -> None:
    """The second is started when another template must wait."""
    renderer = Renderer(30.0, max_chars=1000)
    before = children_of(os.getpid())
    await renderer.start()
    try:
        await asyncio.gather(*(renderer.render(ChatPrompt(template="one", messages=())) for _ in range(5)))
        num_for_one = len(children_of(os.getpid())) - len(before)
        await asyncio.gather(*(renderer.render(ChatPrompt(template=name, messages=())) for name in ("one", "other")))
        num_for_two = len(children_of(os.getpid())) - len(before)
    finally:
        await renderer.close()

    assert (num_for_one, num_for_two) == (1, 2)
