"""``enginehouse doctor``: what it finds, what it advises, and when that is a problem."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginehouse.cli import main

_MODEL = '[models.m]\nsource = "."\nbackend = "fake"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test runs in an empty folder, without settings in the environment."""
    for name in [name for name in os.environ if name.startswith("ENGINEHOUSE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def examine(config: str = "") -> tuple[int, list[dict[str, Any]], list[str]]:
    """Exit code, findings and problems, with a model that runs everywhere; the same are in the table."""
    Path("enginehouse.toml").write_text(f"{config}\n{_MODEL}", encoding="utf-8")
    result = CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    shown = CliRunner().invoke(main, ["doctor"], catch_exceptions=False)

    assert shown.exit_code == result.exit_code == (1 if report["problems"] else 0)
    for found in report["findings"]:
        assert found["state"] in ("ok", "advice", "problem")
        assert bool(found["advice"]) or found["state"] != "advice", found
        assert found["text"].splitlines()[0] in shown.output
    return result.exit_code, report["findings"], report["problems"]


def of(findings: list[dict[str, Any]], subject: str) -> dict[str, Any]:
    return next(found for found in findings if found["subject"] == subject)


def test_everything_is_looked_at() -> None:
    _, findings, _ = examine("[server]\nport = 0\n")

    subjects = {found["subject"] for found in findings}
    assert subjects >= {"compiler", "plugins", "memory", "port", "open files"}
    assert of(findings, "port")["state"] == "ok"
    assert "samplers" in of(findings, "plugins")["text"]


def test_command_is_found_where_the_settings_of_the_environment_are_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken.toml").write_text("[server\n", encoding="utf-8")
    monkeypatch.setenv("ENGINEHOUSE_CONFIG", str(folder / "broken.toml"))
    result = CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False)

    assert result.exit_code == 1
    assert any("broken.toml" in problem for problem in json.loads(result.stdout)["problems"])


def test_settings_that_cannot_be_used_are_one_problem_among_others() -> None:
    code, findings, problems = examine("[server]\nprot = 1\n")

    assert code == 1 and "server.prot" in problems[0] and "did you mean" in problems[0]
    assert of(findings, "settings")["state"] == "problem"
    assert of(findings, "memory")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ('[router]\nstrategy = "dificulty"\n', "unknown router 'dificulty'"),
        ('[models.x]\nsource = "."\nbackend = "fake"\ntool_parser = "nope"\n', "models.x.tool_parser"),
        ('[models.x]\nsource = "."\nbackend = "fake"\ncompressor = "nope"\n', "models.x.compressor"),
        ('[models.x]\nsource = "."\nbackend = "fake"\ndefaults = { heat = 1 }\n', "models.x.defaults.heat"),
        ('[plugins.router]\nrules = [{ model = "y" }]\n[router]\nstrategy = "rules"\n', "plugins.router.rules[0]"),
    ],
)
def test_what_would_stop_the_start_is_a_problem(config: str, problem: str) -> None:
    code, findings, problems = examine(config)

    assert code == 1 and problem in problems[0]
    assert of(findings, "settings")["state"] == "problem"


def test_named_models_are_looked_at_alone() -> None:
    """Also by an alias, and whatever the settings say of the others."""
    Path("enginehouse.toml").write_text(
        f'[router]\nfallbacks = {{ m = ["other"] }}\n{_MODEL}aliases = ["also"]\n'
        '[models.other]\nsource = "nowhere"\nbackend = "fake"\n',
        encoding="utf-8",
    )
    for named in ("m", "also"):
        result = CliRunner().invoke(main, ["doctor", named, "--json"], catch_exceptions=False)
        report = json.loads(result.stdout)
        assert (result.exit_code, [model["name"] for model in report["models"]]) == (0, ["m"])


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, findings, _ = examine(f"[server]\nport = {other.getsockname()[1]}\n")

    found = of(findings, "port")
    assert (code, found["state"]) == (0, "advice") and "server.port" in found["advice"]


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code, findings, _ = examine()

    assert code == 0
    assert of(findings, "compiler")["state"] == "advice" and "build-essential" in of(findings, "compiler")["advice"]


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(60_000))
    models = "".join(f'[models.{name}]\nsource = "{name}"\nbackend = "fake"\n' for name in ("a", "b"))

    def state(budget: str) -> str:
        return str(of(examine(f"[limits]\nmemory_budget = {budget}\n{models}")[1], "memory")["state"])

    assert state("1") == "problem"
    assert state('"100GB"') == "ok"


def test_an_open_server_is_told_what_to_do() -> None:
    code, findings, _ = examine('[server]\nhost = "0.0.0.0"\nport = 0\ninsecure = true\ncors_origins = ["*"]\n')

    reach = [found for found in findings if found["subject"] == "reach"]
    assert code == 0 and len(reach) == 2 and all(found["state"] == "advice" for found in reach)


@pytest.mark.skipif(os.name == "nt", reason="modes of files are Unix")
@pytest.mark.parametrize(("mode", "state"), [(0o600, "ok"), (0o640, "ok"), (0o644, "advice"), (0o666, "problem")])
def test_modes_of_the_key_file(tmp_path: Path, mode: int, state: str) -> None:
    line = (
        CliRunner().invoke(main, ["keys", "hash", "alice", "--stdin"], input="a-key-of-more-than-20-characters").stdout
    )
    (tmp_path / "keys.txt").write_text(line, encoding="utf-8")
    (tmp_path / "keys.txt").chmod(mode)
    code, findings, problems = examine('[auth]\nkey_file = "keys.txt"\n')

    found = of(findings, "keys")
    assert found["state"] == state
    assert code == (1 if state == "problem" else 0) and bool(problems) == (state == "problem")
    if state != "ok":
        assert found["advice"].startswith("chmod 600")


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    code, findings, _ = examine('[auth]\nkey_file = "nothing.txt"\n')
    assert code == 1 and of(findings, "keys")["state"] == "problem"

    (tmp_path / "keys.txt").write_text("nonsense\n", encoding="utf-8")
    code, findings, _ = examine('[auth]\nkey_file = "keys.txt"\n')
    assert code == 1 and "line 1" in of(findings, "keys")["text"]

    (tmp_path / "keys.txt").write_text("# no key, so that the server does not start\n", encoding="utf-8")
    code, findings, _ = examine('[auth]\nkey_file = "keys.txt"\n')
    assert code == 1 and "holds no key" in of(findings, "keys")["text"]


@pytest.mark.skipif(os.name == "nt", reason="the home folder is Unix's")
def test_a_key_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    CliRunner().invoke(main, ["keys", "add", "alice", "--file", "keys.txt"], catch_exceptions=False)
    code, findings, _ = examine('[auth]\nkey_file = "~/keys.txt"\n')

    assert (code, of(findings, "keys")["state"]) == (0, "ok")


def test_keys_for_models_that_are_not_served() -> None:
    keys = '[[auth.keys]]\nname = "batch"\nkey = "a-long-random-string"\nmodels = ["m", "also", "mm"]\n'
    code, findings, _ = examine(keys)
    told = [found["text"] for found in findings if found["subject"] == "keys"]

    assert code == 0
    assert told == [
        "'batch' may use 'also', which is not served",
        "'batch' may use 'mm', which is not served (did you mean 'm'?)",
    ]


@pytest.mark.parametrize(
    ("files", "state", "text"),
    [
        ({"chat_template.jinja": "{{ messages[0].content }}"}, "ok", "it renders a chat"),
        ({"chat_template.jinja": "{{ messages | nope }}"}, "problem", "it is broken, so the model does not load: "),
        (
            {"chat_template.json": json.dumps({"chat_template": "\n{{ 'a' + functions }}"})},
            "problem",
            "no chat can use it: The chat template needs the variable 'functions' (line 2, {{ 'a' + functions }})",
        ),
        (
            {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": "{{ 1 / 0 }}"}]})},
            "problem",
            "no chat can use it: The chat template failed (line 1, {{ 1 / 0 }}): ZeroDivisionError",
        ),
    ],
)
def test_templates_are_tried(folder: Path, files: dict[str, str], state: str, text: str) -> None:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    code, findings, _ = examine("[server]\nport = 0\n")

    found = of(findings, "template 'default' of m")
    assert (code, found["state"]) == (int(state == "problem"), state)
    assert text in found["text"]


def test_templates_without_tools_and_with_them(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% for t in tools %}{{ t }}{% endfor %}")
    (folder / "other.jinja").write_text("{{ messages[0].content }}")
    _, findings, _ = examine("[server]\nport = 0\n")

    assert of(findings, "template 'tool_use' of m")["state"] == "ok"
    Path("enginehouse.toml").write_text(f'{_MODEL}chat_template = "other.jinja"\n', encoding="utf-8")
    result = CliRunner().invoke(main, ["doctor", "--json"], catch_exceptions=False)
    subjects = [found["subject"] for found in json.loads(result.stdout)["findings"]]
    assert [subject for subject in subjects if "template" in subject] == ["template 'chat_template' of m"]


def test_formats_of_templates_are_told_with_their_reasons(folder: Path) -> None:
    template = (
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}<do>{{ call.function.name }}<with>"
        "{{ call.function.arguments | tojson }}</do>{% endfor %}\n{% endfor %}{# [TOOL_CALLS] <think> </think> #}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _, findings, _ = examine("[server]\nport = 0\n")

    found = [(one["state"], one["text"]) for one in findings if one["subject"] == "calls of m"]
    assert found[0][0] == "ok" and found[0][1].startswith("template: <do>f<with>") and "derived" in found[0][1]
    assert found[1][0] == "advice" and "'mistral'" in found[1][1]
    assert of(findings, "reasoning of m")["text"] == "think: from '<think>' to '</think>'"


def weights(folder: Path, **shapes: list[int]) -> None:
    """A safetensors file that consists of its header."""
    tensors = {name.replace("__", "."): {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


LAYERS = {f"model__layers__{number}__mlp__weight": [4, 4] for number in range(2)}


@pytest.mark.parametrize(
    ("tokenizer", "config", "tensors", "problem"),
    [
        ("tokenizer.json", {"num_hidden_layers": 2, "vocab_size": 8, "hidden_size": 4}, LAYERS, ""),
        ("tekken.json", {"text_config": {"num_hidden_layers": 2}}, {**LAYERS, "vision__layers__7__w": [1]}, ""),
        ("README.md", {"num_hidden_layers": 2}, LAYERS, "it has no tokenizer (tokenizer.json, tokenizer.model or"),
        ("a.tiktoken", {"num_hidden_layers": 2}, LAYERS, "its tokenizer is a tiktoken file"),
        (
            "tokenizer.json",
            {"num_hidden_layers": 3},
            LAYERS,
            "config.json has 3 layers, and the weights lack 1 of them",
        ),
        (
            "tokenizer.json",
            {"vocab_size": 8, "hidden_size": 4},
            {"model__embed_tokens__weight": [9, 4]},
            "model.embed_tokens.weight is [9, 4], and config.json says [8, 4]",
        ),
    ],
)
def test_files_without_a_tokenizer_or_with_other_weights(
    folder: Path, tokenizer: str, config: dict[str, Any], tensors: dict[str, list[int]], problem: str
) -> None:
    (folder / tokenizer).write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    weights(folder, **tensors)
    code, findings, _ = examine("[server]\nport = 0\n")

    found = [one["text"] for one in findings if one["subject"] == "files of m"]
    assert (code, len(found)) == (int(bool(problem)), int(bool(problem)))
    assert problem in "".join(found)


def test_weights_that_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"{" * 16)
    _, findings, _ = examine("[server]\nport = 0\n")

    assert "it is damaged" in of(findings, "files of m")["text"]
