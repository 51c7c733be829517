"""Damaged key sets and tokens: a caller is who signed, or nobody; nothing else comes of them."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Credentials, Identity

from .damage import Amount, amounts, damage_bytes, damage_json, damaged_document, run_damaged

jwt = pytest.importorskip("jwt")
pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

from enginehouse_jwt import authenticate  # noqa: E402
from enginehouse_jwt.options import JwtOptions  # noqa: E402

_CLAIMS = {"sub": "alice", "exp": int(time.time()) + 10**6}


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@amounts(600)
def test_key_sets_and_tokens(amount: Amount, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "RS256": rsa.generate_private_key(65537, 2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
    }
    others = {"RS256": rsa.generate_private_key(65537, 2048), "ES256": ec.generate_private_key(ec.SECP256R1())}
    public = [
        {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(keys["RS256"].public_key())), "kid": "r", "use": "sig"},
        {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(keys["ES256"].public_key())), "kid": "e", "alg": "ES256"},
        {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "o"},
        {"kty": "oct", "k": "QUJD", "kid": "s"},
    ]
    path = tmp_path / "jwks.json"
    options = JwtOptions(jwks_file=str(path), algorithms=("RS256", "PS256", "ES256", "EdDSA"))

    def identify(token: str) -> Identity | None:
        try:
            return authenticate(Credentials(token=token), options)
        except PluginError as error:
            assert len(error.message) < 5000
            return None

    def check(random: Random) -> None:
        path.write_bytes(damaged_document(random, {"keys": random.sample(public, random.randint(1, 4))}))
        algorithm = random.choice(["RS256", "ES256"])
        headers = random.choice([{}, {"kid": "r"}, {"kid": "e"}, {"kid": "o"}, {"kid": "s"}])
        found = identify(jwt.encode(_CLAIMS, keys[algorithm], algorithm, headers=headers))
        assert found is None or found.name == "alice"
        assert identify(jwt.encode(_CLAIMS, others[algorithm], algorithm, headers=headers)) is None, "another's key"

        path.write_text(json.dumps({"keys": public}), encoding="utf-8")
        head, claims, signature = jwt.encode(_CLAIMS, keys[algorithm], algorithm, headers=headers).split(".")
        if random.random() < 0.5:
            changed = json.dumps(damage_json(random, {"alg": algorithm, "typ": "JWT", **headers})).encode()
        else:
            changed = damage_bytes(random, base64.urlsafe_b64decode(head + "=="))
        if _part(changed) != head:
            assert identify(f"{_part(changed)}.{claims}.{signature}") is None
        mallory = _part(json.dumps({**_CLAIMS, "sub": "mallory"}).encode())
        assert identify(f"{head}.{mallory}.{signature}") is None
        with contextlib.suppress(UnicodeDecodeError):
            assert identify(damage_bytes(random, f"{head}.{mallory}.{signature}".encode()).decode()) is None

    run_damaged("key sets", amount, check)
