"""Broken plugins at load: one line for each, as ``enginehouse plugins`` shows it; the others are not affected.

Each case is an entry point with the code of its module. All are installed at once, in one folder, and loaded together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from click.testing import CliRunner, Result

from enginehouse.cli import main

HEADER = """from attrs import field, frozen
from enginehouse import hookimpl

@frozen
class NoFields:
    pass

class Sampler:
    name, api_version, request_fields, order = "unnamed", 1, NoFields, 55
    def __init__(self, **changes):
        self.__dict__.update(changes)
    def create(self, fields):
        return None
"""
SAMPLERS = "\n@hookimpl\ndef register_samplers(register):\n    "


def samplers(line: str) -> str:
    """A module whose hook for samplers has this line."""
    return HEADER + SAMPLERS + line + "\n"


@frozen
class Case:
    """A broken plugin.

    Attributes:
        code: its module; None if there is none.
        reason: the error that is shown.
        note: the warning that is shown.
        target: attribute of the module that the entry point names.
        brings: what it brings all the same.
    """

    code: str | None
    reason: str | None = None
    note: str | None = None
    target: str = ""
    brings: tuple[str, ...] = ()


CASES = {
    "no_library": Case(
        "import no_such_library\n",
        "ModuleNotFoundError: No module named 'no_such_library' (broken_no_library.py:1)",
    ),
    "no_module": Case(None, "ModuleNotFoundError: No module named 'broken_no_module'"),
    "no_attribute": Case(
        "", "AttributeError: module 'broken_no_attribute' has no attribute 'Plugin'", target=":Plugin"
    ),
    "syntax": Case("def broken(:\n", "SyntaxError: invalid syntax (broken_syntax.py, line 1)"),
    "exits": Case("import sys\nsys.exit(3)\n", "SystemExit: 3 (broken_exits.py:2)"),
    "raises_at_import": Case("\n\n{}['weights']\n", "KeyError: 'weights' (broken_raises_at_import.py:3)"),
    "wrong_hook": Case(
        HEADER + "\n@hookimpl\ndef register_sampler(register): pass\n",
        "unknown hook 'register_sampler' (did you mean 'register_samplers'?)",
    ),
    "no_hook": Case(HEADER, "it implements no hook; mark functions with @enginehouse.hookimpl"),
    "argument": Case(
        HEADER + "\n@hookimpl\ndef register_samplers(registry): pass\n",
        "PluginValidationError: Plugin 'argument' for hook 'register_samplers' hookimpl definition: "
        "register_samplers(registry) Argument(s) {'registry'} are declared in the hookimpl but can not be found in "
        "the hookspec",
    ),
    "coroutine": Case(
        HEADER + "\n@hookimpl\nasync def register_samplers(register): register(Sampler())\n",
        "the hook register_samplers must be defined with def, not async def",
    ),
    "generator": Case(
        HEADER + "\n@hookimpl\ndef register_samplers(register): yield Sampler()\n",
        "the hook register_samplers must not be a generator: remove yield, and call register(...)",
    ),
    "raises": Case(samplers("{}['weights']"), "KeyError: 'weights' (broken_raises.py:17, in register_samplers)"),
    "gives_a_list": Case(
        samplers("return [Sampler()]"),
        "register_samplers registered nothing, but returned a list: call register(...) instead",
    ),
    "nothing": Case(samplers("pass"), note="register_samplers registered nothing"),
    "no_version": Case(
        HEADER.replace("api_version, ", "").replace("1, NoF", "NoF") + SAMPLERS + "register(Sampler())\n",
        "the sampler 'unnamed' lacks api_version",
    ),
    "new_version": Case(
        samplers("register(Sampler(api_version=9))"),
        "the sampler 'unnamed' has api_version 9; this Enginehouse takes 1",
    ),
    "text_version": Case(
        samplers("register(Sampler(api_version='1'))"), "api_version of the sampler 'unnamed' must be an int, not '1'"
    ),
    "options": Case(HEADER + "options = dict\n" + SAMPLERS + "pass\n", "options must be an attrs class"),
    "fields": Case(
        samplers("register(Sampler(request_fields=dict))"), "'unnamed': request_fields must be an attrs class"
    ),
    "text": Case(
        samplers("register('text')"), "the sampler 'text' lacks name, api_version, request_fields, order, create"
    ),
    "a_class": Case(
        samplers("register(Sampler)"), "the sampler must be an object, not the class Sampler: call register(Sampler())"
    ),
    "async_method": Case(
        HEADER + "async def create(fields): pass\n" + SAMPLERS + "register(Sampler(create=create))\n",
        "create of the sampler 'unnamed' must be defined with def, not async def",
    ),
    "core_name": Case(samplers("register(Sampler(name='min_p'))"), "the sampler name 'min_p' is core's own"),
    "core_place": Case(
        samplers("register(Sampler(order=40))"),
        "the sampler 'unnamed' has the order 40 of core's step 'min_p'; use any other, such as 41",
    ),
    "core_field": Case(
        HEADER
        + "@frozen\nclass Fields:\n    top_p: float = 1.0\n"
        + SAMPLERS
        + "register(Sampler(request_fields=Fields))\n",
        "the request field 'top_p' is core's own",
    ),
    "same_owner": Case(
        HEADER
        + "@frozen\nclass Fields:\n    prepared: bool = False\n"
        + "class Preparer:\n    name, api_version, request_fields = 'typical_p', 1, Fields\n"
        + "    def bind(self, settings, objects): return self\n"
        + "\n@hookimpl\ndef register_preparers(register):\n    register(Preparer())\n",
        "the plugin 'samplers' has request fields under the name 'typical_p' already; use another name",
    ),
    "a_thief": Case(
        samplers("register(Sampler(name='the_owner'))"),
        "the sampler name 'the_owner' is taken by the plugin 'the_owner'",
    ),
    "the_owner": Case(samplers("register(Sampler(name='the_owner'))"), brings=("sampler the_owner",)),
    "impostor": Case(
        samplers("register(Sampler(name='typical_p'))"),
        "the sampler name 'typical_p' is taken by the plugin 'samplers'",
    ),
    "same_object": Case(None, "it is the same object as the plugin 'prints'"),
    "samplers": Case("", "the name is taken by the plugin of enginehouse"),
    "slow": Case(
        "import time\ntime.sleep(1.05)\n" + samplers("register(Sampler(name='late'))"),
        note="import and register hooks took ",
        brings=("sampler late",),
    ),
    "prints": Case(
        "import ctypes, os\nprint('printed at import')\nos.write(1, b'written at import\\n')\n"
        "ctypes.CDLL(None).printf(b'printed in C\\n')\n"
        + samplers("print('printed in a hook'); register(Sampler(name='loud'))"),
        brings=("sampler loud",),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the distribution ``broken-kit`` with all cases, on the path of imports."""
    folder = tmp_path_factory.mktemp("broken")
    entries = []
    for name, case in CASES.items():
        if case.code is not None:
            (folder / f"broken_{name}.py").write_text(case.code)
        module = "broken_prints" if name == "same_object" else f"broken_{name}"
        entries.append(f"{name} = {module}{case.target}\n")
    info = folder / "broken_kit-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-kit\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[enginehouse]\n" + "".join(entries))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("COLUMNS", "80")
        yield folder
    for name in [name for name in sys.modules if name.startswith("broken_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def shown(folder: Path) -> Result:
    """``enginehouse plugins`` at 80 columns, the first time that the plugins are imported."""
    return CliRunner().invoke(main, ["plugins", "--strict"], catch_exceptions=False)


@pytest.fixture(scope="module")
def listed(shown: Result) -> Result:
    """The plugins as JSON."""
    return CliRunner().invoke(main, ["plugins", "--json"], catch_exceptions=False)


@pytest.fixture(scope="module")
def records(listed: Result) -> dict[str, dict[str, Any]]:
    """The records of the broken distribution, by name."""
    return {record["name"]: record for record in json.loads(listed.stdout) if record["distribution"] == "broken-kit"}


@pytest.mark.parametrize("name", CASES)
def test_each_broken_plugin_has_its_line(shown: Result, records: dict[str, dict[str, Any]], name: str) -> None:
    case, record, lines = CASES[name], records[name], shown.stdout.splitlines()

    assert record["error"] == case.reason
    assert tuple(record["brings"]) == case.brings
    if case.reason is not None:
        assert f"{name} (broken-kit): {case.reason}" in lines
    if case.note is not None:
        assert any(line.startswith(f"{name} (broken-kit): {case.note}") for line in lines)


def test_prints_of_plugins_go_to_standard_error(shown: Result, listed: Result) -> None:
    assert "printed" not in shown.stdout + listed.stdout
    assert "printed at import" in shown.stderr
    assert "printed in a hook" in listed.stderr


def test_output_of_libraries_in_c_goes_to_standard_error(folder: Path) -> None:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "enginehouse", "plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})

    assert "prints" in {record["name"] for record in json.loads(done.stdout)}
    for text in ("printed at import", "written at import", "printed in C", "printed in a hook"):
        assert text in done.stderr


def test_strict_listing_fails_if_a_plugin_has_an_error(shown: Result, listed: Result) -> None:
    assert (shown.exit_code, listed.exit_code) == (1, 0)


def test_verbose_listing_has_the_tracebacks(folder: Path, shown: Result) -> None:
    output = CliRunner().invoke(main, ["plugins", "-v"], catch_exceptions=False).output

    assert f'File "{folder}/broken_raises.py", line 17, in register_samplers' in output


def test_other_plugins_are_not_affected(listed: Result) -> None:
    found = {record["name"]: record for record in json.loads(listed.stdout) if record["distribution"] == "enginehouse"}

    assert [name for name, record in found.items() if record["error"]] == []
    assert "sampler typical_p" in found["samplers"]["brings"]
