"""Key sets and key files as issuers publish them, with entries that verify nothing, and wrong ones; told once."""

import base64
import hashlib
import hmac
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins.guarded import Authenticator
from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_jwt import authenticate
from enginehouse_jwt.options import JwtOptions
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

jwt = pytest.importorskip("jwt")
pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402
from cryptography.hazmat.primitives.serialization import (  # noqa: E402
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

LATER = int(time.time()) + 3600
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
EC384 = ec.generate_private_key(ec.SECP384R1())
ED = ed25519.Ed25519PrivateKey.generate()
ALGORITHMS = ("RS256", "PS256", "ES256", "ES384", "EdDSA")


def token(key: Any, algorithm: str, key_id: Any = "sig") -> str:
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode({"sub": "alice", "exp": LATER}, key, algorithm, headers=headers)


def part(data: dict) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def jwk(key: Any, private: bool = False, **members: Any) -> dict:
    name = {RSA: "RSA", EC: "EC", EC384: "EC", ED: "OKP"}[key]
    kind = {"RSA": jwt.algorithms.RSAAlgorithm, "EC": jwt.algorithms.ECAlgorithm, "OKP": jwt.algorithms.OKPAlgorithm}
    return {**json.loads(kind[name].to_jwk(key if private else key.public_key())), **members}


def identify(given: str, path: Path, **options: Any) -> Identity | None:
    return authenticate(
        Credentials(token=given), JwtOptions(jwks_file=str(path), **{"algorithms": ALGORITHMS, **options})
    )


SIGNING = jwk(RSA, kid="sig", use="sig", alg="RS256")
USELESS = {
    "for_encryption": jwk(RSA, kid="enc", use="enc"),
    "rsa_oaep": jwk(RSA, kid="enc", alg="RSA-OAEP"),
    "rsa_oaep_of_the_same_id": jwk(RSA, kid="sig", alg="RSA-OAEP-256", use="enc"),
    "key_ops": jwk(RSA, kid="enc", key_ops=["wrapKey"]),
    "key_ops_of_another_kind": jwk(RSA, kid="enc", key_ops=7),
    "ecdh": {**jwk(EC, kid="enc"), "alg": "ECDH-ES"},
    "x25519": {"kty": "OKP", "crv": "X25519", "x": "L-PYI6-PnGXRGvx8rY4nXvEmOdGRzE6wkWOMOgjcW2o"},
    "unknown_kind": {"kty": "AKP", "kid": "pq", "alg": "ML-DSA-44", "pub": "AAAA"},
    "half_a_character": {"kty": "OKP", "crv": "\ud800", "x": "AAAA"},
    "kind_of_another_type": {"kty": ["RSA"], "kid": 5},
    "unknown_curve": {"kty": "EC", "crv": "secp521k1", "x": "AAAA", "y": "AAAA"},
    "a_point_beside_the_curve": {"kty": "EC", "crv": "P-256", "x": "AAAA", "y": "AAAA"},
    "damaged_base64": {"kty": "RSA", "n": "!!!", "e": "AQAB", "kid": "bad"},
    "no_modulus": {"kty": "RSA", "e": "AQAB"},
    "a_short_modulus": {"kty": "RSA", "n": "wJ" + "A" * 40 + "E", "e": "AQAB"},
    "modulus_of_nothing": {"kty": "RSA", "n": "AA", "e": "AA"},
    "a_huge_modulus": {"kty": "RSA", "n": "A" * 100_000, "e": "AQAB"},
    "an_id_of_another_type": jwk(RSA, kid=5),
    "a_shared_secret": {"kty": "oct", "kid": "secret", "k": "AAAA"},
    "no_object": "RSA",
    "null": None,
    "empty": {},
}


@pytest.mark.parametrize("entry", USELESS.values(), ids=USELESS)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_entry_that_cannot_verify_is_left_out_and_told_once(
    entry: Any, is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [entry, SIGNING] if is_first else [SIGNING, entry]}))

    for _ in range(5):
        assert identify(token(RSA, "RS256"), path) is not None
        assert identify(token(RSA, "RS256", None), path) is not None

    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.getMessage().encode("utf-8")
    assert "jwks.json" in line.getMessage() and f"keys[{0 if is_first else 1}]" in line.getMessage()
    assert len(line.getMessage()) < 500


def test_a_key_verifies_tokens_of_its_own_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [jwk(RSA, kid="r"), jwk(EC, kid="e"), jwk(ED, kid="o"), jwk(EC384, kid="f")]}))
    known = {("r", "RS256"): RSA, ("r", "PS256"): RSA, ("e", "ES256"): EC, ("o", "EdDSA"): ED, ("f", "ES384"): EC384}

    for (key_id, algorithm), key in known.items():
        assert identify(token(key, algorithm, key_id), path) is not None
        for other in {"r", "e", "o", "f", "x"} - {key_id}:
            assert identify(token(key, algorithm, other), path) is None
    assert identify(token(ED, "EdDSA", None), path) is not None  # the only key of that kind
    assert identify(token(RSA, "PS256", "r"), path, algorithms=("RS256",)) is None


def test_the_algorithm_that_a_key_names_is_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [SIGNING]}))

    assert identify(token(RSA, "RS256"), path) is not None
    assert identify(token(RSA, "PS256"), path) is None


def test_a_published_key_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [SIGNING, {"kty": "oct", "kid": "k", "k": "QUJD" * 20}]}))
    public = RSA.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    for secret, key_id in ((public, "sig"), (b"ABC" * 20, "k"), (SIGNING["n"].encode(), "sig")):
        signed = f"{part({'alg': 'HS256', 'kid': key_id})}.{part({'sub': 'alice', 'exp': LATER})}"
        signature = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        assert identify(f"{signed}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}", path) is None
    none = jwt.encode({"sub": "alice", "exp": LATER}, "", "none", headers={"kid": "sig"})
    assert identify(none, path) is None


def test_private_parts_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [jwk(RSA, private=True, kid="sig", key_ops=["sign", "verify"])]}))
    pem = tmp_path / "key.pem"
    pem.write_bytes(RSA.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    assert identify(token(RSA, "RS256"), path) is not None
    assert authenticate(Credentials(token=token(RSA, "RS256")), JwtOptions(public_key_file=str(pem))) is not None


@pytest.mark.parametrize("header", [{"kid": 5}, {"kid": ["sig"]}, {"alg": 5}, {"alg": "RS1"}, {"crit": ["x"]}])
def test_a_header_of_another_form_is_nobody(header: dict, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [SIGNING]}))
    head, rest = token(RSA, "RS256").split(".", 1)
    data = {**json.loads(base64.urlsafe_b64decode(head + "==")), **header}
    changed = base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()

    assert identify(f"{changed}.{rest}", path) is None


def test_a_deep_header_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [SIGNING]}))
    deep = base64.urlsafe_b64encode(b'{"a":' + b"[" * 100_000).decode().rstrip("=")

    assert identify(f"{deep}.e30.AA", path) is None


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def _short_key(path: Path) -> None:
    key = rsa.generate_private_key(65537, 1024)
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


WRONG = {
    "missing": lambda path: None,
    "a_folder": lambda path: path.mkdir(),
    "a_pipe": _pipe,
    "a_device": lambda path: path.symlink_to("/dev/zero"),
    "too_large": lambda path: path.write_bytes(b" " * 2_000_000),
    "no_json": lambda path: path.write_text("{"),
    "no_text": lambda path: path.write_bytes(b"\xff\xfe"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no_keys": lambda path: path.write_text('{"keys": 5}'),
    "many_keys": lambda path: path.write_text(json.dumps({"keys": [{}] * 1001})),
    "a_short_key": _short_key,
    "only_useless_keys": lambda path: path.write_text(json.dumps({"keys": list(USELESS.values())})),
}


@pytest.mark.parametrize("setting", ["jwks_file", "public_key_file"])
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_told_once(make: Any, setting: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    make(path)
    options = JwtOptions(**{setting: str(path)})
    authenticator = Authenticator("jwt", lambda credentials: authenticate(credentials, options))

    for number in range(20):
        with pytest.raises(PluginError, match="failed"):
            authenticator.identify(Credentials(token=token(RSA, "RS256", f"id{number}")))

    (line,) = [record for record in log.records if record.levelno >= logging.WARNING]
    assert line.exc_info is not None and "keys" in str(line.exc_info[1])
    assert len(str(line.exc_info[1])) < 2000


def test_a_plugin_that_fails_is_told_once_with_its_traceback(log: pytest.LogCaptureFixture) -> None:
    def ask(credentials: Credentials) -> Identity | None:
        raise ValueError(credentials.token)

    authenticator = Authenticator("x", ask)
    for number in range(50):
        with pytest.raises(PluginError):
            authenticator.identify(Credentials(token=f"token {number}"))

    (line,) = log.records
    assert line.exc_info is not None


def test_a_server_takes_tokens_of_a_set_with_other_keys_in_it(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [*USELESS.values(), SIGNING]}))
    hello = write_script(tmp_path / "hello.json", ["Hel", "lo"])
    settings = Settings(
        auth=AuthSettings(authenticators=("jwt",)),
        models={"m": ModelSettings(source=hello, backend="scripted")},
        plugins=PluginsSettings(allow=("jwt",), options={"jwt": {"jwks_file": str(path)}}),
    )
    with served(settings, timeout=20) as client:
        headers = {"authorization": f"Bearer {token(RSA, 'RS256')}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        headers = {"authorization": f"Bearer {token(RSA, 'RS256', 'enc')}"}
        assert client.get("/v1/models", headers=headers).status_code == 401
