"""Keys of settings and key files: who is found, what is refused, and where a file is wrong."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.api.http.keys import KeyRing, hash_key, key_line, load_keys, new_key, read_key_file
from enginehouse.cli import main
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import load_settings

KEY = "a-key-that-nobody-guesses"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_keys_of_the_settings_are_found() -> None:
    bob = KeySettings(name="bob", key="b", scopes=("metrics", "admin"), profile="omlx", namespace="team")
    ring = load_keys(AuthSettings(keys=("a", bob, "schlüssel")))

    assert [ring.find(key.encode()).name for key in ("a", "b", "schlüssel")] == ["key-1", "bob", "key-3"]
    first, second = ring.find(b"a"), ring.find(b"b")
    assert (first.scopes, first.profile, first.namespace) == ({"infer"}, None, "key-1")
    assert (second.scopes, second.profile, second.namespace) == ({"metrics", "admin"}, "omlx", "team")


@pytest.mark.parametrize("given", [b"", b"A", b"a ", b"aa", b"\xff", b"x" * 100_000])
def test_other_keys_are_not_found(given: bytes) -> None:
    assert load_keys(AuthSettings(keys=("a",))).find(given) is None


def test_without_keys_the_ring_is_empty() -> None:
    assert KeyRing(()).is_empty and KeyRing(()).find(b"a") is None


def test_keys_of_a_file_are_found(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "# who may call",
        "",
        key_line("alice", hash_key(KEY)),
        "  " + key_line("bob", hash_key(KEY + "2"), ["infer", "admin"], "octomil", "team").replace(" ", "\t "),
    )
    ring = load_keys(AuthSettings(keys=("plain",), key_file=str(path)))

    alice, bob = ring.find(KEY.encode()), ring.find(f"{KEY}2".encode())
    assert (alice.name, alice.scopes, alice.profile, alice.namespace) == ("alice", {"infer"}, None, "alice")
    assert (bob.name, bob.scopes, bob.profile, bob.namespace) == ("bob", {"infer", "admin"}, "octomil", "team")
    assert ring.find(b"plain").name == "key-1"
    assert KEY not in path.read_text(encoding="utf-8")


def test_the_same_key_has_another_hash_each_time() -> None:
    assert hash_key(KEY) != hash_key(KEY)


GOOD = key_line("alice", hash_key(KEY))
HASH = GOOD.split()[1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "must be a name, a hash and options"),
        (f"bob {KEY}", "the second word must be a hash"),
        ("bob HASH_CUT", "the second word must be a hash"),
        (f"bob sha256:{'0' * 32}:{'0' * 64}", "the second word must be a hash"),
        ("bob HASH scope=infer", "unknown option 'scope' (did you mean 'scopes'?)"),
        ("bob HASH scopes=infer,root", "unknown scope 'root'"),
        ("bob HASH scopes=", "the option 'scopes' needs one value"),
        ("bob HASH scopes=infer scopes=admin", "the option 'scopes' needs one value"),
        ("bob HASH profile=openapi", "unknown profile 'openapi'"),
        ("b\x00b HASH", "cannot be printed"),
        ("alice HASH", "the name 'alice' is taken"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    line = line.replace("HASH_CUT", HASH[:-1]).replace("HASH", HASH)  # it has a random salt
    path = write(tmp_path, "# comment", GOOD, line)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)

    assert problem in caught.value.message
    assert f"{path}, line 3: " in caught.value.message
    assert caught.value.path == "auth.key_file"
    assert KEY not in caught.value.message


def test_files_that_hold_no_key_are_refused(tmp_path: Path) -> None:
    """Else a truncated file would open the server to everybody."""
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(write(tmp_path, "# nobody yet"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(tmp_path / "binary")


def test_a_name_in_the_settings_and_the_file_is_refused(tmp_path: Path) -> None:
    settings = AuthSettings(keys=(KeySettings(name="alice", key="a"),), key_file=str(write(tmp_path, GOOD)))
    with pytest.raises(ConfigError, match="line 1: the name 'alice' is taken"):
        load_keys(settings)


def test_a_key_in_the_settings_and_the_file_is_refused(tmp_path: Path) -> None:
    """The two could have different scopes, and one of them would count for nothing."""
    settings = AuthSettings(keys=("a", KeySettings(name="bob", key=KEY)), key_file=str(write(tmp_path, GOOD)))
    with pytest.raises(ConfigError, match="'alice' in the key file has the same key") as caught:
        load_keys(settings)

    assert caught.value.path == "auth.keys[1]"


@pytest.mark.parametrize("key", ["short", "x" * 19, "x" * 2000])
def test_keys_that_can_be_guessed_are_not_hashed(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 20 characters"):
        hash_key(key)


def test_new_keys_are_long_and_different() -> None:
    assert len(new_key()) > 40 and new_key() != new_key()


def test_settings_with_keys(tmp_path: Path) -> None:
    config = tmp_path / "enginehouse.toml"
    write(tmp_path, GOOD)
    config.write_text("[auth]\nkeys = ['a', {name = 'b', key = 'k', scopes = ['admin']}]\nkey_file = 'keys.txt'\n")
    auth = load_settings(config, {}).auth

    assert auth.keys == ("a", KeySettings(name="b", key="k", scopes=("admin",)))
    assert Path(auth.key_file) == tmp_path / "keys.txt"
    assert "'k'" not in repr(auth)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ("['']", "auth.keys[0]"),
        ("['a', '  ']", "auth.keys[1]"),
        ("[5]", "auth.keys[0]"),
        ("[{name = 'a'}]", "auth.keys[0].key"),
        ("[{name = 'a', key = 12345678}]", "auth.keys[0]"),
        ("[{name = 'a b', key = 'k'}]", "auth.keys[0].name"),
        ("[{name = 'a', key = 'k', scopes = []}]", "auth.keys[0].scopes"),
        ("[{name = 'a', key = 'k', scopes = ['root']}]", "auth.keys[0].scopes[0]"),
        ("[{name = 'a', key = 'k', profile = 'x'}]", "auth.keys[0].profile"),
        ("[{name = 'a', key = 'k', scope = 'infer'}]", "auth.keys[0].scope"),
        ("[{name = 'a', key = 'k'}, {name = 'a', key = 'l'}]", "auth.keys[1]"),
        ("['k', {name = 'key-1', key = 'l'}]", "auth.keys[1]"),
        (f"['{'x' * 1025}']", "auth.keys[0]"),
    ],
)
def test_wrong_keys_in_settings(tmp_path: Path, keys: str, path: str) -> None:
    config = tmp_path / "enginehouse.toml"
    config.write_text(f"[auth]\nkeys = {keys}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(config, {})

    assert caught.value.path == path
    assert "12345678" not in caught.value.message


def test_beyond_loopback_a_key_file_is_enough(tmp_path: Path) -> None:
    config = tmp_path / "enginehouse.toml"
    config.write_text("[server]\nhost = '0.0.0.0'\n[auth]\nkey_file = 'keys.txt'\n")

    assert load_settings(config, {}).auth.needs_key


def test_the_command_makes_lines_for_the_file(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["keys", "hash", "alice", "--scope", "infer", "--scope", "metrics"])
    named = re.fullmatch(r"The key of alice, shown only now: (\S+)\n", made.stderr)
    assert made.exit_code == 0 and named is not None
    assert read_key_file(write(tmp_path, made.stdout))[0].scopes == {"infer", "metrics"}
    assert KeyRing(read_key_file(tmp_path / "keys.txt")).find(named[1].encode()).name == "alice"

    given = CliRunner().invoke(main, ["keys", "hash", "bob", "--profile", "omlx", "--stdin"], input=f"{KEY}\n")
    assert given.exit_code == 0 and KEY not in given.output
    record = KeyRing(read_key_file(write(tmp_path, given.stdout))).find(KEY.encode())
    assert (record.name, record.profile) == ("bob", "omlx")


@pytest.mark.parametrize("name", ["a b", "#alice", ""])
def test_the_command_refuses_names_that_the_file_could_not_hold(name: str) -> None:
    refused = CliRunner().invoke(main, ["keys", "hash", name])

    assert refused.exit_code == 2
    assert "blake2b" not in refused.stdout
