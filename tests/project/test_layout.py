"""One word per plugin everywhere; nothing in a folder that the wheel forgets."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

from .repository import (
    ROOT,
    imported_modules,
    plugin_folders,
    pyproject,
    source_files,
    syntax_of,
    tox_environments,
    tox_ini,
)

AREAS = ("core", "plugins", "contrib", "tests", "examples")
CORE = ROOT / "core" / "enginehouse"
PACKAGES = sorted(path.parent for path in (*CORE.glob("*/__init__.py"), *CORE.glob("api/*/__init__.py")))


def imported_packages(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imported_modules(syntax_of(path))}


def test_folders_hold_packages_only() -> None:
    """All that is in them goes into the wheel, under its own name; the pages of ``docs`` go into a package of it."""
    *areas, pages = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert pages == "docs"
    for area in areas:
        packages = {path.name for path in (ROOT / area).iterdir() if (path / "__init__.py").is_file()}
        others = {path.name for path in (ROOT / area).iterdir()} - packages - {"__pycache__"}
        assert all(name.startswith("enginehouse") for name in packages)
        assert others == {"README.md"}, f"{area} holds {others}"


def test_entry_points_are_the_plugin_folders() -> None:
    """Those of the installed package, which hatch_build.py has made; after a new folder, install it again."""
    installed = importlib.metadata.distribution("enginehouse").entry_points.select(group="enginehouse")

    found = {point.name: point.value for point in installed}
    assert found == {name.removeprefix("enginehouse_"): name for name in plugin_folders()}


def test_plugins_never_import_each_other() -> None:
    """A test, because import-linter would need a list of them."""
    for name, folder in plugin_folders().items():
        for path in folder.rglob("*.py"):
            others = imported_packages(path) & (plugin_folders().keys() - {name})
            assert not others, f"{path} imports {others}"


def test_core_imports_no_plugin() -> None:
    for path in source_files("core"):
        plugins = imported_packages(path) & plugin_folders().keys()
        assert not plugins, f"{path} imports {plugins}"


def test_every_plugin_has_tests() -> None:
    for name, folder in plugin_folders().items():
        tests = ROOT / "tests" / folder.parent.name / name.removeprefix("enginehouse_")
        assert list(tests.glob("test_*.py")), f"{tests} holds no tests"


def test_tests_of_core_mirror_its_packages() -> None:
    packages = {package.name for package in PACKAGES if package.parent == CORE}
    folders = {path.name for path in (ROOT / "tests" / "core").iterdir() if path.is_dir()} - {"__pycache__"}

    assert folders - {"behaviours", "faults", "fuzz", "seeds", "backendkit", "testkit"} == packages
    assert not list((ROOT / "tests" / "core").glob("test_*.py"))


def test_every_backend_has_its_extra_marker_and_environment(pytestconfig: pytest.Config) -> None:
    first_party = {record.name for record in PluginRegistry.load(PluginsSettings()).plugins if not record.error}
    backends = {"hf", "llamacpp", "mlx", "remote"} & first_party
    project = pyproject()
    markers = {marker.split(":")[0] for marker in pytestconfig.getini("markers")}

    assert backends == {"hf", "llamacpp", "mlx", "remote"}
    assert backends <= set(project["project"]["optional-dependencies"])
    assert backends <= markers
    assert backends <= tox_environments()


def test_extra_all_holds_every_extra() -> None:
    """But for what only authors of plugins need, and Ray, which brings another web framework."""
    extras = pyproject()["project"]["optional-dependencies"]
    held = set(extras["all"][0].removeprefix("enginehouse[").removesuffix("]").split(","))

    assert held == set(extras) - {"all", "testing", "ray"}


@pytest.mark.parametrize("area", AREAS)
def test_every_area_says_what_may_not_live_there(area: str) -> None:
    lines = (ROOT / area / "README.md").read_text().strip().splitlines()

    assert len([line for line in lines if line.strip()]) <= 5
    assert " not" in " ".join(lines)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_every_package_says_what_may_not_live_there(folder: Path) -> None:
    text = (folder / "README.md").read_text()

    assert len([line for line in text.splitlines() if line.strip()]) <= 5
    assert re.search(r"\b(no|not|nothing)\b", text, re.IGNORECASE)


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

    assert users <= {"enginehouse/__init__.py", "enginehouse/contract/hookspecs.py", "enginehouse/plugins/loader.py"}


def test_every_tests_folder_is_run_by_tox() -> None:
    """By the environments without extras; what these leave out is named in another one."""
    ini = (ROOT / "tox.ini").read_text()
    core_tests = tox_ini()["testenv"]["core_tests"].split()

    assert {"tests/core", "tests/project", "tests/plugins", "tests/contrib"} <= set(core_tests)
    for ignored in [word.removeprefix("--ignore=") for word in core_tests if word.startswith("--ignore=")]:
        assert (ROOT / ignored).exists()
        assert re.search(rf"(?<!=){ignored}(?![\w/])", ini), f"no environment runs {ignored}"


@pytest.mark.parametrize(
    ("sections", "extras"),
    [
        (("testenv:llamacpp{,-slow}",), {"llamacpp", "compress"}),
        (("testenv:llamacpp{,-slow}", "testenv:remote"), {"llguidance"}),
        (("testenv:{runners,hf,mlx}{,-slow}",), {"hf", "mlx"}),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_tests_with_the_marker_of_an_extra_are_run_by_tox(sections: tuple[str, ...], extras: set[str]) -> None:
    """The environments without extras leave them out, in whatever folder they are; ``all`` runs what needs two."""
    words = [word for section in sections for word in tox_ini()[section]["commands"].split()]
    folders = [ROOT / word for word in words if word.startswith("tests/")]
    marks = {
        path: set(re.findall(r"\bmark\.(\w+)", path.read_text(encoding="utf-8")))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not path.is_relative_to(ROOT / "tests" / "outside")
    }
    marked = [path for path, found in marks.items() if found & extras and not {"llamacpp", "hf"} <= found]

    assert marked
    assert [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)] == []
