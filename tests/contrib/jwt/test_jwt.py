"""Callers with JSON Web Tokens: whose is taken, what claims grant, and what must never work."""

import base64
import hashlib
import hmac
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings, structure_options
from enginehouse_jwt import authenticate
from enginehouse_jwt.options import JwtOptions
from enginehouse_testkit.authenticator_contract import AuthenticatorContract
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

jwt = pytest.importorskip("jwt")

SECRET = "a secret that is long enough for each of the algorithms that share one"
LATER = int(time.time()) + 3600


def token(key: Any = SECRET, algorithm: str = "HS256", headers: dict | None = None, **claims) -> str:
    return jwt.encode({"sub": "alice", "exp": LATER, **claims}, key, algorithm, headers=headers)


def identify(given: str, **options) -> Identity | None:
    return authenticate(Credentials(token=given), JwtOptions(**(options or {"secret": SECRET})))


class TestSecret(AuthenticatorContract):
    """Tokens of a shared secret."""

    known = (Credentials(token=token()), Credentials(token=token(sub="bob", scope="infer admin")))
    unknown = (
        Credentials(token=token("another secret that is long enough")),
        Credentials(token=token(exp=1)),
        Credentials(token=token(nbf=LATER)),
        Credentials(token=jwt.encode({"sub": "alice", "exp": LATER}, "", "none")),
        Credentials(token=jwt.encode({"sub": "alice"}, SECRET)),
        Credentials(token=jwt.encode({"exp": LATER}, SECRET)),
        Credentials(token=token(algorithm="HS512")),
        Credentials(token=token(aud="others")),
    )

    @pytest.fixture(scope="class")
    @classmethod
    def ask(cls):
        return partial(authenticate, options=JwtOptions(secret=SECRET))


@pytest.fixture(scope="module")
def rsa() -> Any:
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

    return generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def public_pem(rsa: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    path = tmp_path_factory.mktemp("keys") / "issuer.pem"
    path.write_bytes(rsa.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def jwk(rsa: Any, key_id: str | None) -> dict:
    data = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(rsa.public_key()))
    return data | ({} if key_id is None else {"kid": key_id})


def test_claims_say_what_a_caller_may_do() -> None:
    found = identify(
        token(
            scope="openid infer metrics",
            models=["small", "tiny"],
            namespace="team",
            profile="octomil",
            limits={"requests_per_minute": 60, "tokens_per_minute": 9000, "max_concurrent": 2, "priority": -1},
        )
    )

    assert found is not None
    assert (found.name, found.scopes, found.models) == ("alice", {"infer", "metrics"}, {"small", "tiny"})
    assert (found.namespace, found.profile, found.priority) == ("team", "octomil", -1)
    assert (found.requests_per_minute, found.tokens_per_minute, found.max_concurrent) == (60, 9000, 2)
    assert found.expires is not None and abs(found.expires.timestamp() - LATER - 10) < 1


def test_without_claims_the_settings_say_it() -> None:
    found = identify(token())
    assert found is not None
    assert (found.scopes, found.models, found.namespace, found.priority) == ({"infer"}, None, "", 0)
    admin = identify(token(), secret=SECRET, default_scopes=("admin",))
    assert admin is not None and admin.scopes == {"admin"}
    stranger = identify(token(scope="openid profile"))
    assert stranger is not None and stranger.scopes == frozenset()  # the claim is there, and grants nothing


def test_claims_have_the_names_of_the_settings() -> None:
    found = identify(
        token(email="a@b.example", roles=["admin"]), secret=SECRET, name_claim="email", scopes_claim="roles"
    )

    assert found is not None and (found.name, found.scopes) == ("a@b.example", {"admin"})


@pytest.mark.parametrize(
    "claims",
    [
        {"models": 5},
        {"models": [1]},
        {"scope": {"infer": True}},
        {"namespace": 1},
        {"limits": []},
        {"limits": {"requests_per_minute": 0}},
        {"limits": {"max_concurrent": True}},
        {"limits": {"rpm": 5}},
        {"sub": ""},
    ],
)
def test_claims_that_are_wrong_never_grant_more(claims: dict, caplog: pytest.LogCaptureFixture) -> None:
    assert identify(token(**claims)) is None
    assert "a token was refused: " in caplog.text


def test_issuer_and_audience_are_checked_where_they_are_set() -> None:
    options = {"secret": SECRET, "issuer": "https://id.example", "audience": "enginehouse"}

    assert identify(token(iss="https://id.example", aud="enginehouse"), **options) is not None
    assert identify(token(iss="https://id.example", aud=["x", "enginehouse"]), **options) is not None
    for claims in ({}, {"iss": "https://id.example"}, {"iss": "https://evil.example", "aud": "enginehouse"}):
        assert identify(token(**claims), **options) is None


def test_a_public_key_verifies(rsa: Any, public_pem: Path) -> None:
    options = {"public_key_file": str(public_pem)}

    assert identify(token(rsa, "RS256"), **options) is not None
    assert identify(token(), **options) is None


def test_a_public_key_is_no_secret(public_pem: Path) -> None:
    """The oldest attack: sign with HS256 and the published key as the secret."""
    head = {"alg": "HS256", "typ": "JWT"}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (head, {"sub": "x", "exp": LATER})
    ]
    signed = b".".join(parts)
    signature = hmac.new(public_pem.read_bytes(), signed, hashlib.sha256).digest()
    forged = (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()

    assert identify(forged, public_key_file=str(public_pem)) is None
    with pytest.raises(ValueError, match="must suit the key"):
        JwtOptions(public_key_file=str(public_pem), algorithms=("RS256", "HS256"))
    with pytest.raises(ValueError, match="must suit the key"):
        JwtOptions(secret=SECRET, algorithms=("none",))


def test_a_key_set_is_chosen_from_by_id_and_read_again(rsa: Any, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

    other = generate_private_key(65537, 2048)
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [jwk(rsa, "old"), {"kty": "oct", "kid": "secret", "k": "AAAA"}]}))
    options = {"jwks_file": str(path)}

    assert identify(token(rsa, "RS256", headers={"kid": "old"}), **options) is not None
    assert identify(token(rsa, "RS256"), **options) is not None  # there is only one
    assert identify(token(rsa, "RS256", headers={"kid": "secret"}), **options) is None
    assert identify(token(other, "RS256", headers={"kid": "old"}), **options) is None
    new = tmp_path / "new.json"
    new.write_text(json.dumps({"keys": [jwk(rsa, "old"), jwk(other, "new")]}))
    new.replace(path)
    assert identify(token(other, "RS256", headers={"kid": "new"}), **options) is not None
    assert identify(token(rsa, "RS256"), **options) is None  # which one, it must say now
    path.write_text("{}")
    with pytest.raises(PluginError, match="key set is wrong"):
        identify(token(rsa, "RS256"), **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"secret": "short"}, "at least 32 bytes"),
        ({"secret": "x" * 40, "algorithms": ["HS256", "HS512"]}, "at least 64 bytes"),
        ({"secret": SECRET, "jwks_file": "x"}, "name one of"),
        ({"issuers": "x"}, "unknown setting"),
        ({"default_scopes": ["root"]}, "must be one of"),
    ],
)
def test_wrong_settings_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        structure_options(JwtOptions, options, "plugins.jwt")


def test_without_a_key_nobody_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="no key to verify"):
        identify(token(), issuer="x")
    with pytest.raises(PluginError, match="set OUR_SECRET"):
        identify(token(), secret_env="OUR_SECRET")
    monkeypatch.setenv("OUR_SECRET", "short")
    with pytest.raises(PluginError, match="at least 32 bytes"):
        identify(token(), secret_env="OUR_SECRET")
    monkeypatch.setenv("OUR_SECRET", SECRET)
    assert identify(token(), secret_env="OUR_SECRET") is not None
    with pytest.raises(PluginError, match="cannot read"):
        identify(token(), public_key_file="/nowhere.pem")


def test_tokens_open_a_server_beside_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # At the turn of a minute rates count anew.
    for module in ("limits.aio.storage.memory", "enginehouse.api.http.admission.gate"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=lambda: 1_700_000_040.0))
    hello = write_script(tmp_path / "hello.json", ["Hel", "lo"])
    settings = Settings(
        auth=AuthSettings(keys=(KeySettings(name="bob", key="bobs-key"),), authenticators=("jwt",)),
        models={name: ModelSettings(source=hello, backend="scripted") for name in ("m", "other")},
        plugins=PluginsSettings(allow=("jwt",), options={"jwt": {"secret": SECRET}}),
    )
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=20) as client:

        def ask(given: str, model: str = "m") -> httpx.Response:
            headers = {"authorization": f"Bearer {given}"}
            return client.post("/v1/chat/completions", json=chat | {"model": model}, headers=headers)

        wait_ready(client)
        assert ask("bobs-key").status_code == 200
        limited = token(models=["m"], limits={"requests_per_minute": 2})
        assert ask(limited).headers["x-ratelimit-remaining-requests"] == "1"
        assert ask(limited, "other").status_code == 404
        assert ask(limited).status_code == 429
        assert ask(token(sub="carol")).status_code == 200
        assert ask(token(scope="metrics")).status_code == 403
        for wrong in ("none", token("another secret that is long enough"), token(exp=1), token(models=5)):
            assert ask(wrong).status_code == 401
