"""Looks into a built sdist and wheel, installs the wheel in a fresh environment and uses it.

Called by tox's ``package`` environment: ``python -m project.check_package DIST_FOLDER ENVIRONMENT_FOLDER``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .repository import ROOT, plugin_folders, source_files

__all__ = ["check_package"]


def check_package(dist: Path, environment: Path) -> None:
    """Exit with a message at the first thing that is wrong."""
    (wheel,), (sdist,) = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
    check_wheel(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        check_sdist(name.partition("/")[2] for name in archive.getnames())
    check_installed(install(wheel, environment))
    print(f"{wheel.name} and {sdist.name} are complete, and the wheel works")


def check_wheel(names: Iterable[str]) -> None:
    """The wheel holds every source file, and nothing that is not ours."""
    wanted = {path.relative_to(path_root(path)).as_posix() for path in source_files()}
    held = set(names)
    missing = wanted - held
    expect(not missing, f"the wheel lacks {sorted(missing)}")
    expect("enginehouse/py.typed" in held, "the wheel lacks py.typed")
    pages = {f"enginehouse/pages/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    expect(pages <= held, f"the wheel lacks {sorted(pages - held)}")
    packages = {name.split("/")[0] for name in held if ".dist-info/" not in name}
    expect(
        packages == {"enginehouse", "enginehouse_backendkit", "enginehouse_testkit", *plugin_folders()},
        f"the wheel holds {sorted(packages)}",
    )


def path_root(path: Path) -> Path:
    """The folder of a source file's package."""
    return ROOT / path.relative_to(ROOT).parts[0]


def check_sdist(names: Iterable[str]) -> None:
    """The sdist is enough to build and test."""
    held = set(names)
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "tox.ini",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "docs/plugins.md",
    ):
        expect(name in held, f"the sdist lacks {name}")
    for path in source_files("core", "plugins", "contrib", "tests", "examples"):
        name = path.relative_to(ROOT).as_posix()
        expect(name in held, f"the sdist lacks {name}")


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel alone; returns the folder of the new environment's programs."""
    venv.create(environment, clear=True, with_pip=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", wheel], check=True)
    return programs


def check_installed(programs: Path) -> None:
    """Without any extra every plugin loads, and ``serve`` says what to do."""
    version = run(programs, "--version")
    expect(version.returncode == 0 and "0." in version.stdout, f"--version says {version.stdout}")
    plugins = json.loads(run(programs, "plugins", "--json").stdout)
    expect(
        {plugin["name"] for plugin in plugins} == {name.partition("_")[2] for name in plugin_folders()}, str(plugins)
    )
    expect(all(plugin["error"] is None for plugin in plugins), f"a plugin does not load: {plugins}")
    new = run(programs, "plugins", "new", "probe", "--folder", str(programs.parent / "probe"))
    expect((programs.parent / "probe" / "enginehouse_probe" / "backend.py").is_file(), f"plugins new says {new.stderr}")
    served = run(programs, "serve")
    expect(served.returncode == 2, f"serve without a model exits with {served.returncode}: {served.stderr}")
    expect("pip install 'enginehouse[llamacpp,starter]'" in served.stderr, f"serve says {served.stderr!r}")


def run(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command, far from the checkout."""
    command = [programs / "enginehouse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=programs, timeout=60, check=False)


def expect(condition: bool, message: str) -> None:
    """Stop with ``message`` unless ``condition`` holds."""
    if not condition:
        sys.exit(f"package check failed: {message}")


if __name__ == "__main__":
    check_package(Path(sys.argv[1]), Path(sys.argv[2]))
