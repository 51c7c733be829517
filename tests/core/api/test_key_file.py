"""The key file while it is in use: commands that change it, and a server that follows."""

import json
import os
import re
import stat
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from enginehouse.api.http.keys import KeyStore, add_key, hash_key, key_line, read_key_file, revoke_key
from enginehouse.api.http.keys.file import KeyRing
from enginehouse.api.http.keys.store import load_keys
from enginehouse.cli import main
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings, load_settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

KEY = "a-key-that-nobody-guesses"
LINE = key_line("alice", hash_key(KEY))


def run(*arguments: str | Path, **options) -> Result:
    return CliRunner().invoke(main, ["keys", *map(str, arguments)], **options)


def added(path: Path, name: str, *options: str) -> str:
    """The key of a name that is added."""
    result = run("add", name, "--file", path, *options)
    shown = re.search(r"shown only now: (\S+)", result.stderr)
    assert result.exit_code == 0 and shown is not None, result.output
    return shown[1]


def test_a_key_is_added_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    key = added(path, "alice", "--model", "small", "--model", "tiny", "--rpm", "60", "--concurrent", "2")
    added(
        path, "bob", "--scope", "admin", "--tpm", "9000", "--priority", "-1", "--namespace", "team", "--expires", "30d"
    )
    store = KeyStore(AuthSettings(key_file=str(path)))

    alice = store.ring.find(key.encode())
    assert (alice.name, alice.models, alice.requests_per_minute, alice.max_concurrent) == (
        "alice",
        {"small", "tiny"},
        60,
        2,
    )
    listed = json.loads(run("list", "--file", path, "--json").stdout)
    assert [row["name"] for row in listed] == ["alice", "bob"]
    assert listed[1]["scopes"] == ["admin"] and listed[1]["priority"] == -1 and listed[1]["namespace"] == "team"
    days = (datetime.fromisoformat(listed[1]["expires"]) - datetime.now(UTC)) / timedelta(days=1)
    assert 29.9 < days < 30.1 and not listed[1]["expired"]
    table = run("list", "--file", path).stdout
    assert "alice" in table and key not in table and "blake2b" not in table
    assert run("revoke", "alice", "--file", path).exit_code == 0
    assert [record.name for record in read_key_file(path)] == ["bob"]
    missing = run("revoke", "alice", "--file", path)
    assert missing.exit_code == 1 and "no key of the name 'alice'" in missing.output


def test_the_file_of_the_configuration_is_meant(tmp_path: Path) -> None:
    config = tmp_path / "enginehouse.toml"
    config.write_text("[auth]\nkey_file = 'keys.txt'\n")
    assert run("add", "alice", "--config", config).exit_code == 0

    assert read_key_file(tmp_path / "keys.txt")[0].name == "alice"
    assert load_settings(config, {}).auth.key_file == str(tmp_path / "keys.txt")
    config.write_text("")
    refused = run("add", "bob", "--config", config)
    assert refused.exit_code == 2 and "--file" in refused.output


def test_a_given_key_can_be_added(tmp_path: Path) -> None:
    result = run("add", "alice", "--file", tmp_path / "keys.txt", "--stdin", input=f"{KEY}\n")
    assert result.exit_code == 0 and KEY not in result.output

    assert KeyStore(AuthSettings(key_file=str(tmp_path / "keys.txt"))).ring.find(KEY.encode()).name == "alice"


@pytest.mark.parametrize("given", ["", "\n", "short\n"])
def test_no_key_is_made_up_where_one_should_have_been_given(tmp_path: Path, given: str) -> None:
    """An unset variable in a script would otherwise add a key that nobody has seen."""
    refused = run("add", "alice", "--file", tmp_path / "keys.txt", "--stdin", input=given)

    assert refused.exit_code == 2 and "at least 20 characters" in refused.output
    assert not (tmp_path / "keys.txt").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--model", "a,b"], "commas"),
        (["--model", "a b"], "without spaces"),
        (["--expires", "soon"], "must be a day or a moment"),
        (["--rpm", "0"], "0 is not in the range"),
        (["--scope", "root"], "'root' is not one of"),
    ],
)
def test_what_a_key_cannot_have_is_refused(tmp_path: Path, options: list[str], problem: str) -> None:
    refused = run("add", "alice", "--file", tmp_path / "keys.txt", *options)

    assert refused.exit_code == 2 and problem in refused.output
    assert not (tmp_path / "keys.txt").exists()


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("rpm=0", "'rpm' must be a whole number of at least 1, not '0'"),
        ("tpm=-5", "'tpm' must be"),
        ("concurrent=two", "'concurrent' must be"),
        ("priority=high", "'priority' must be a whole number"),
        ("models=a,,b", "'models' needs names"),
        ("expires=tomorrow", "'expires' must be a day or a moment"),
        ("model=a", "unknown option 'model' (did you mean 'models'?)"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, option: str, problem: str) -> None:
    (tmp_path / "keys.txt").write_text(f"{LINE} {option}\n")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_key_file(tmp_path / "keys.txt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("models", ["", "a"]), ("models", []), ("expires", "soon"), ("requests_per_minute", 0), ("max_concurrent", -1)],
)
def test_the_same_in_the_settings_is_named(tmp_path: Path, field: str, value) -> None:
    config = tmp_path / "enginehouse.toml"
    config.write_text(f"[[auth.keys]]\nname = 'a'\nkey = 'b'\n{field} = {json.dumps(value)}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(config, {})

    assert caught.value.path == f"auth.keys[0].{field}"


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("# comment stays\n" + LINE)
    path.chmod(0o644)
    add_key(path, key_line("bob", hash_key(KEY + "2")))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# comment stays", LINE] and lines[2].startswith("bob ")
    assert revoke_key(path, "alice") and path.read_text().startswith("# comment stays\nbob ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["keys.txt", "keys.txt.lock"]


@pytest.mark.parametrize("text", ["alice nonsense\n", LINE + "\n" + LINE + "\n"], ids=["no hash", "twice"])
def test_a_broken_file_is_not_changed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line"):
        add_key(path, key_line("bob", hash_key(KEY + "2")))

    assert path.read_text() == text


def test_a_name_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    add_key(path, LINE)
    with pytest.raises(ConfigError, match="'alice' is taken"):
        add_key(path, key_line("alice", hash_key(KEY + "2")))

    assert path.read_text() == f"{LINE}\n"


def test_simultaneous_changes_lose_nothing_and_readers_see_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    add_key(path, LINE)
    lines = [[key_line(f"n{worker}-{number}", hash_key(KEY)) for number in range(10)] for worker in range(4)]
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(len(read_key_file(path)))

    def write(worker: int) -> None:
        for line in lines[worker]:
            add_key(path, line)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()

    assert len(read_key_file(path)) == 41
    assert seen == sorted(seen)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.txt"
    link.symlink_to(tmp_path / "real" / "keys.txt")
    add_key(link, LINE)

    assert link.is_symlink() and read_key_file(tmp_path / "real" / "keys.txt")[0].name == "alice"


def test_the_store_follows_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.txt"
    add_key(path, LINE)
    store = KeyStore(AuthSettings(keys=("plain",), key_file=str(path)))
    assert not store.refresh()
    add_key(path, key_line("bob", hash_key(KEY + "2")))
    assert store.refresh() and store.ring.find(f"{KEY}2".encode()).name == "bob"
    path.write_text("alice broken\n")
    assert not store.refresh() and store.ring.find(KEY.encode()).name == "alice"
    assert "old keys stay" in caplog.text and "line 1" in caplog.text
    caplog.clear()
    assert not store.refresh() and not caplog.text  # told once
    path.unlink()
    assert not store.refresh() and store.ring.find(KEY.encode()).name == "alice"
    path.write_text(f"{LINE}\n")

    assert store.refresh() and store.ring.find(f"{KEY}2".encode()) is None
    assert store.ring.find(b"plain").name == "key-1"


def test_revoking_the_last_key_refuses_everyone(tmp_path: Path) -> None:
    """An empty file must not mean that everybody may call, nor that the revoked key still may."""
    path = tmp_path / "keys.txt"
    add_key(path, LINE)
    store = KeyStore(AuthSettings(key_file=str(path)))
    revoke_key(path, "alice")
    assert store.refresh()

    assert store.needs_key and store.ring.find(KEY.encode()) is None


def test_new_settings_can_be_loaded(tmp_path: Path) -> None:
    store = KeyStore(AuthSettings(keys=("one",)))
    with pytest.raises(ConfigError):
        store.reload(AuthSettings(key_file=str(tmp_path / "missing")))
    assert store.ring.find(b"one") is not None
    store.reload(AuthSettings(keys=("two",)))

    assert store.ring.find(b"one") is None and store.ring.find(b"two") is not None


def test_new_settings_hold_though_the_file_was_being_read_for_the_old_ones(tmp_path: Path, monkeypatch) -> None:
    """Who changes keys changes both, and then reloads: the key that the settings had must not come back."""
    path = tmp_path / "keys.txt"
    add_key(path, LINE)
    store = KeyStore(AuthSettings(keys=("revoked",), key_file=str(path)))
    add_key(path, key_line("bob", hash_key(KEY + "2")))
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read_slowly(settings: AuthSettings, **options: bool) -> KeyRing:
        ring = load_keys(settings, **options)
        if settings.keys:
            is_reading.set()
            assert may_go_on.wait(60)
        return ring

    monkeypatch.setattr("enginehouse.api.http.keys.store.load_keys", read_slowly)
    new = AuthSettings(key_file=str(path))
    threads = [threading.Thread(target=store.refresh), threading.Thread(target=store.reload, args=(new,))]
    threads[0].start()
    assert is_reading.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    may_go_on.set()
    for thread in threads:
        thread.join(60)

    assert store.ring.find(b"revoked") is None and store.ring.find(KEY.encode()).name == "alice"
    assert not store.refresh() and store.ring.find(b"revoked") is None


def test_a_running_server_follows_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    first = added(path, "first")
    settings = Settings(
        auth=AuthSettings(key_file=str(path)),
        models={"m": ModelSettings(source=write_script(tmp_path / "s.json", ["a"]), backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )

    def wait(key: str, status: int) -> None:
        deadline = time.monotonic() + 60
        while (now := client.get("/v1/models", headers={"x-api-key": key}).status_code) != status:
            assert time.monotonic() < deadline, now
            time.sleep(0.05)

    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        wait(first, 200)
        second = added(path, "second")
        wait(second, 200)
        assert run("revoke", "first", "--file", path).exit_code == 0
        wait(first, 401)
        os.utime(path)
        path.write_text("nonsense")
        time.sleep(1.5)
        wait(second, 200)


def test_an_expired_key_is_told_so(tmp_path: Path) -> None:
    past, future = "2020-01-01", (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    keys = (KeySettings(name="old", key="old", expires=past), KeySettings(name="new", key="new", expires=future))
    settings = Settings(
        auth=AuthSettings(keys=keys),
        models={"m": ModelSettings(source=write_script(tmp_path / "s.json", ["a"]), backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        refused = client.get("/v1/models", headers={"x-api-key": "old"})
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "expired_api_key"
        assert client.get("/v1/models", headers={"x-api-key": "none"}).json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"x-api-key": "new"}).status_code == 200
        assert client.get("/health", headers={"x-api-key": "old"}).status_code in (200, 503)
