"""Profiles as data, the addresses that name them, and their example configurations."""

from pathlib import Path
from typing import get_args

import pytest

from enginehouse.api.generation.details import optimization_headers
from enginehouse.api.http.callers import Caller, split_compat
from enginehouse.api.http.keys import KeyRecord
from enginehouse.contract.usage import Usage
from enginehouse.pipeline.parameters import read_defaults
from enginehouse.settings.config import load_settings
from enginehouse.settings.profiles import DEFAULT_PROFILE, PROFILES, Profile, ProfileName

EXAMPLES = Path(__file__).parents[3] / "examples" / "profiles"


def test_every_name_has_its_profile() -> None:
    assert list(PROFILES) == list(get_args(ProfileName))
    assert all(name == profile.name for name, profile in PROFILES.items())
    assert PROFILES["openai"] is DEFAULT_PROFILE


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_defaults_are_request_fields(profile: Profile) -> None:
    defaults = read_defaults(profile.defaults, "profile", {})

    assert {**defaults.sampling, **defaults.stopping} == dict(profile.defaults)


def test_defaults_of_the_pages() -> None:
    assert {name: dict(profile.defaults) for name, profile in PROFILES.items()} == {
        "openai": {},
        "octomil": {"temperature": 0.7, "top_p": 0.9},
        "mini-sglang": {"max_tokens": 16},
        "octoai": {"max_tokens": 512},
        "omlx": {"max_tokens": 32768},
    }


def test_every_profile_has_an_example_configuration() -> None:
    files = sorted(EXAMPLES.glob("*.toml"))

    assert [path.stem for path in files] == sorted(PROFILES.keys() - {"openai"})
    for path in files:
        settings = load_settings(path, {})
        assert settings.server.profile == path.stem
        assert settings.models["starter"].source == "starter"
        assert path.read_text(encoding="utf-8").splitlines()[0].endswith(f"--config examples/profiles/{path.name}")


@pytest.mark.parametrize(
    ("path", "profile", "rest"),
    [
        ("/v1/models", None, "/v1/models"),
        ("/compat/omlx/v1/models", "omlx", "/v1/models"),
        ("/compat/mini-sglang/v1/models/a/b", "mini-sglang", "/v1/models/a/b"),
        ("/compat/omlx/v1/../health", "omlx", "/v1/../health"),
        ("/compat/omlx/health", None, "/compat/omlx/health"),
        ("/compat/omlx//health", None, "/compat/omlx//health"),
        ("/compat/omlx/v1", None, "/compat/omlx/v1"),
        ("/compat/other/v1/models", None, "/compat/other/v1/models"),
        ("/compat/", None, "/compat/"),
        ("/COMPAT/omlx/v1/models", None, "/COMPAT/omlx/v1/models"),
    ],
)
def test_addresses(path: str, profile: str | None, rest: str) -> None:
    named, address = split_compat(path)

    assert (named.name if named else None, address) == (profile, rest)


def test_namespaces_of_callers_never_meet() -> None:
    def caller(namespace: str | None) -> Caller:
        record = namespace and KeyRecord(name="x", salt=b"", digest=b"", namespace=namespace)
        return Caller(profile=DEFAULT_PROFILE, key=record or None)

    pairs = [(key, salt) for key in ("a", "ab", "b") for salt in ("", "a", "b", "\0", "a\0b", "b\0")]
    assert len({caller(key).namespace(salt) for key, salt in pairs}) == len(pairs)
    assert caller(None).namespace("salt") == "salt"


def test_headers_tell_only_what_was_saved() -> None:
    profile = Profile(name="octomil", optimization_headers={"cached_tokens": "x-cached", "forced_tokens": "x-forced"})
    usage = Usage(prompt_tokens=9, cached_tokens=7, completion_tokens=1)

    assert optimization_headers(usage, profile) == [("x-cached", "7")]
    assert optimization_headers(usage, PROFILES["octomil"]) == []
