"""One word per plugin everywhere; nothing in a folder that the wheel forgets."""

from __future__ import annotations

import pytest

from enginehouse.config import PluginsSettings
from enginehouse.plugins import PluginRegistry

from .repository import ROOT, imported_modules, plugin_folders, pyproject, source_files, syntax_of, tox_environments

AREAS = ("core", "plugins", "contrib", "tests", "examples")


def entry_points() -> dict[str, str]:
    return pyproject()["project"]["entry-points"]["enginehouse"]


def test_wheel_list_is_core_and_every_plugin_folder() -> None:
    listed = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    folders = [folder.relative_to(ROOT).as_posix() for folder in plugin_folders().values()]
    assert sorted(listed) == sorted(["core/enginehouse", "core/enginehouse_testkit", *folders])


def test_entry_points_are_the_plugin_folders() -> None:
    assert entry_points() == {name.removeprefix("enginehouse_"): name for name in plugin_folders()}


def test_import_contracts_know_every_plugin() -> None:
    settings = pyproject()["tool"]["importlinter"]
    independence = next(contract for contract in settings["contracts"] if contract["type"] == "independence")

    assert sorted(settings["root_packages"]) == sorted(["enginehouse", "enginehouse_testkit", *plugin_folders()])
    assert sorted(independence["modules"]) == sorted(plugin_folders())


def test_every_plugin_has_tests() -> None:
    for name, folder in plugin_folders().items():
        tests = ROOT / "tests" / folder.parent.name / name.removeprefix("enginehouse_")
        assert list(tests.glob("test_*.py")), f"{tests} holds no tests"


def test_every_backend_has_its_extra_marker_and_environment() -> None:
    first_party = {record.name for record in PluginRegistry.load(PluginsSettings()).plugins if not record.error}
    backends = {"hf", "llamacpp", "mlx", "remote"} & first_party
    project = pyproject()
    markers = {marker.split(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]}

    assert backends == {"hf", "llamacpp", "mlx", "remote"}
    assert backends <= set(project["project"]["optional-dependencies"])
    assert backends <= markers
    assert backends <= tox_environments()


def test_extra_all_holds_every_extra() -> None:
    """But for what only authors of plugins need."""
    extras = pyproject()["project"]["optional-dependencies"]
    held = set(extras["all"][0].removeprefix("enginehouse[").removesuffix("]").split(","))

    assert held == set(extras) - {"all", "testing"}


@pytest.mark.parametrize("area", AREAS)
def test_every_area_says_what_may_not_live_there(area: str) -> None:
    lines = (ROOT / area / "README.md").read_text().strip().splitlines()

    assert len([line for line in lines if line.strip()]) <= 5
    assert " not" in " ".join(lines)


def test_plugin_modules_hold_hooks_only() -> None:
    """What an entry point names is imported at every start: it must not import a library."""
    for folder in plugin_folders().values():
        modules = set(imported_modules(syntax_of(folder / "__init__.py")))
        outside = {
            module for module in modules if module.split(".")[0] not in ("__future__", "enginehouse", folder.name)
        }
        assert outside <= {"collections.abc", "typing"}, f"{folder.name} imports {outside}"


def test_pluggy_stays_where_hooks_are_collected() -> None:
    """Nothing that runs per request or per token can reach a hook."""
    users = {
        path.relative_to(ROOT / "core").as_posix()
        for path in source_files()
        if "pluggy" in set(imported_modules(syntax_of(path)))
    }

    assert users <= {"enginehouse/__init__.py", "enginehouse/hookspecs.py", "enginehouse/plugins/loader.py"}


def test_every_tests_folder_is_run_by_tox() -> None:
    ini = (ROOT / "tox.ini").read_text()

    for name, folder in plugin_folders().items():
        area = f"tests/{folder.parent.name}"
        assert f"{area}/{name.removeprefix('enginehouse_')}" in ini or f" {area} " in ini, f"no environment runs {name}"
