"""``enginehouse chat``: through pipes, in a terminal, against a running server and one of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define, evolve

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, ServerSettings, Settings
from enginehouse_chat.conversation import AnswerPart, ChatFailed, Conversation
from enginehouse_chat.slash_commands import run_command
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

KEY = "a-key-for-the-chat-tests"
# The terminal becomes the controlling one, so that Ctrl-C reaches the command as a signal.
_IN_TERMINAL = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("enginehouse", run_name="__main__", alter_sys=True)
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<think>\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("ENGINEHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a model that answers, one that reasons first, one that never ends, and one that fails."""
    scripts = tmp_path_factory.mktemp("scripts")
    template = scripts / "think.jinja"
    template.write_text(TEMPLATE)
    tokens = {
        "hello": [{"text": "Hel"}, {"text": "lo \x1b[31m"}, {"text": "wörld"}],
        "thinker": [{"text": "Let me"}, {"text": " see."}, {"text": "</think>"}, {"text": "Seven"}],
        "endless": [{"text": "on "}, {"delay_s": 0.01}],
        "failing": [{"text": "half"}, {"error": "boom"}],
    }
    models = {}
    for name, script in tokens.items():
        source = scripts / f"{name}.json"
        source.write_text(json.dumps({"tokens": script, "loop": name == "endless"}))
        models[name] = ModelSettings(source=str(source), backend="scripted")
    models["thinker"] = evolve(models["thinker"], chat_template=str(template))
    auth = AuthSettings(keys=(KeySettings(name="tests", key=KEY),))
    with server_thread(Settings(models=models, server=ServerSettings(), auth=auth)) as running:
        wait_ready(running.url)
        yield running.url


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "enginehouse", "chat", *arguments]


def piped(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=text, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False
    )


# -- through pipes ---------------------------------------------------------------------------------


def test_piped_text_is_one_question_and_the_output_is_its_answer(url: str) -> None:
    done = piped("Say\nhello.", "hello", "--url", url, "--key", KEY)

    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello \x1b[31mwörld\n", "")


def test_reasoning_is_no_part_of_a_piped_answer(url: str) -> None:
    assert piped("What?", "thinker", "--url", f"{url}/v1", "--key", KEY).stdout == "Seven\n"


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["hello", "--key", "wrong"], "Hi", "lists no models: 401"),
        (["absent", "--key", KEY], "Hi", "serves no model 'absent'; it serves hello"),
        (["failing", "--key", KEY], "Hi", "The model failed"),
        (["hello", "--key", KEY, "--temperature", "99"], "Hi", "temperature"),
        (["hello", "--key", KEY], " \n", "standard input is empty"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(url: str, arguments: list[str], text: str, message: str) -> None:
    done = piped(text, *arguments, "--url", url)

    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_server_that_is_not_there_is_named() -> None:
    done = piped("Hi", "--url", "http://127.0.0.1:9")

    assert done.returncode == 2
    assert "http://127.0.0.1:9/v1 cannot be reached" in done.stderr


def test_without_an_address_the_model_is_served_for_this_command(folder: Path) -> None:
    (folder / "script.json").write_text(json.dumps({"tokens": [{"text": "From my own server"}]}))
    (folder / "enginehouse.toml").write_text(
        "[auth]\nkeys = ['nobody-needs-this-key-here']\n[models.demo]\nsource = 'script.json'\nbackend = 'scripted'\n"
    )

    assert piped("Hi").stdout == piped("Hi", "demo").stdout == "From my own server\n"


def test_what_the_settings_say_of_other_models_does_not_matter(folder: Path) -> None:
    """One model is served: neither a router nor a compressor's scorer can have the others."""
    (folder / "script.json").write_text(json.dumps({"tokens": [{"text": "Alone"}]}))
    (folder / "enginehouse.toml").write_text(
        "[router]\nmodels = ['other', 'demo']\nfallbacks = { demo = ['other'] }\n"
        "[models.other]\nsource = 'script.json'\nbackend = 'scripted'\n"
        "[models.demo]\nsource = 'script.json'\nbackend = 'scripted'\n"
        "compressor = { method = 'scored', scorer = 'other' }\n"
    )
    done = piped("Hi", "demo")

    assert (done.returncode, done.stdout) == (0, "Alone\n"), done.stderr


def test_model_that_cannot_be_loaded_says_why(folder: Path) -> None:
    (folder / "broken.json").write_text("{")
    done = piped("Hi", "broken.json", "--backend", "scripted")

    assert done.returncode == 2
    assert "could not be loaded" in done.stderr
    assert "broken.json" in done.stderr


# -- in a terminal ---------------------------------------------------------------------------------


@define
class Terminal:
    """A pseudo-terminal with the command at its other end."""

    process: subprocess.Popen[bytes]
    fd: int
    seen: str = ""

    def write(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """Everything from the last wait up to ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} in {self.seen!r}")
            try:
                data = os.read(self.fd, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""
            if not data:
                raise AssertionError(f"ended without {text!r}: {self.seen!r}")
            self.seen += data.decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=env,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_conversation_in_a_terminal(url: str, folder: Path) -> None:
    with terminal("hello", "--url", url, "--key", KEY, "--system", "Be kind.") as screen:
        screen.wait_for("Ctrl-D ends.")
        screen.write("Hi\n")
        answer = screen.wait_for("wörld")
        screen.write("/set temperature 0.5\n")
        screen.wait_for("temperature = 0.5")
        screen.write("/save talk.json\n")
        screen.wait_for("holds 2 messages")
        screen.write("/nonsense\n")
        screen.wait_for("Unknown command /nonsense")
        screen.wait_for("> ")  # typed before the prompt, Ctrl-D would end nothing
        screen.write("\x04")
        code = screen.process.wait(30)

    assert code == 0
    assert "\x1b[31m" not in answer  # a model does not colour the terminal
    assert json.loads((folder / "talk.json").read_text()) == {
        "model": "hello",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello \x1b[31mwörld"},
        ],
        "temperature": 0.5,
    }


def test_reasoning_is_dimmed(url: str) -> None:
    with terminal("thinker", "--url", url, "--key", KEY) as screen:
        screen.wait_for("> ")
        screen.write("What?\n")
        shown = screen.wait_for("Seven")

    assert "\x1b[2mLet me see." in shown
    assert shown.index("\x1b[0m", shown.index("see.")) < shown.index("Seven")


def test_ctrl_c_stops_the_answer_and_not_the_chat(url: str) -> None:
    with terminal("endless", "--url", url, "--key", KEY) as screen:
        screen.wait_for("> ")
        screen.write("Go on\n")
        screen.wait_for("on on on")
        screen.write("\x03")
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        screen.write("half a line\x03")  # at the prompt it throws away what was typed
        screen.wait_for("> ")
        screen.write("/exit\n")

        assert screen.process.wait(30) == 0


def test_failed_answer_leaves_the_chat_open(url: str) -> None:
    with terminal("failing", "--url", url, "--key", KEY) as screen:
        screen.wait_for("> ")
        screen.write("Hi\n")
        screen.wait_for("The model failed")
        screen.write("/exit\n")

        assert screen.process.wait(30) == 0


# -- what a line does ------------------------------------------------------------------------------


def test_commands_change_the_conversation(folder: Path) -> None:
    talk = Conversation("http://unused/v1", "m", system="First.", turns=[{"role": "user", "content": "Hi"}])

    assert "First." in (run_command("/system", talk) or "")
    assert "Second." in (run_command("/system Second.", talk) or "")
    assert 'stop = ["a", "b"]' in (run_command('/set stop ["a", "b"]', talk) or "")
    assert 'user = "me"' in (run_command("/set user me", talk) or "")
    assert "user" not in (run_command("/set user", talk) or "")
    assert "cannot be written" in (run_command("/save no/such/folder.json", talk) or "")
    assert "Name a file" in (run_command("/save", talk) or "")
    assert "/reset" in (run_command("/help", talk) or "")
    run_command("/reset", talk)
    assert talk.messages == [{"role": "system", "content": "Second."}]
    assert talk.fields == {"stop": ["a", "b"]}
    assert run_command("/exit", talk) is None


def test_stopped_answer_stays_with_what_had_come(url: str) -> None:
    talk = Conversation(f"{url}/v1", "endless", KEY)
    parts = talk.ask("Go on")
    first = next(parts)
    parts.close()

    assert first == AnswerPart("text", "on ")
    assert talk.turns == [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "on "}]


def test_refused_question_is_taken_back(url: str) -> None:
    talk = Conversation(f"{url}/v1", "hello", KEY, fields={"temperature": "hot"})
    with pytest.raises(ChatFailed, match=r"400: .*temperature"):
        list(talk.ask("Hi"))

    assert talk.turns == []
