"""Where a server listens and how it is reached: socket files, IPv6, TLS, a path behind a proxy, names of hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import define, field

from enginehouse.api.http.listening import listen
from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import (
    AuthSettings,
    ModelSettings,
    PluginsSettings,
    ServerSettings,
    Settings,
    load_settings,
)
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.server_thread import server_thread

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@define(eq=False)
class Process:
    """``enginehouse serve`` with any address."""

    process: subprocess.Popen[str]
    lines: list[str] = field(factory=list)

    def wait_for(self, text: str) -> str:
        """The first line that holds ``text``."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended: {''.join(self.lines)}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.lines += list(self.process.stderr)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(folder: Path, *arguments: str, wait: bool = True) -> Iterator[Process]:
    script = write_script(folder / "m.json", ["Hel", "lo"])
    command = [sys.executable, "-m", "enginehouse", "serve", "--backend", "scripted", script, *arguments]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        server = Process(process)
        try:
            if wait:
                server.wait_for("is ready at")
            yield server
        finally:
            process.kill()


def run(*arguments: str, env: dict[str, str] | None = None, question: str | None = None) -> str:
    """What a command writes."""
    done = subprocess.run(
        [sys.executable, "-m", "enginehouse", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        input=question,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def refusal(folder: Path, *arguments: str) -> str:
    """Why the server does not start."""
    with serve(folder, *arguments, wait=False) as server:
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert server.process.wait(60) == 2, said
    assert "Traceback" not in said
    return " ".join(said.split())


# -- socket files ----------------------------------------------------------------------------------


def unix_client(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20)


def test_a_socket_file_is_listened_on_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serve(tmp_path, "--uds", "s.sock") as server:
        assert any(f"listening on unix:{path}" in line for line in server.lines)
        assert f"unix:{path}" in server.lines[-1]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with unix_client(path) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            assert client.get("/admin/models", timeout=60).status_code == 200
            assert client.get("/admin/models", headers={"x-forwarded-for": "203.0.113.9"}).status_code == 403
            assert client.get("/admin/models", headers={"origin": "https://evil.example"}).status_code == 403
            assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert server.stop() == 0
    assert not path.exists()


def test_further_ports_serve_the_same(tmp_path: Path) -> None:
    (tmp_path / "further.toml").write_text("server = {extra_ports = [0, 0]}\n")
    with serve(tmp_path, "--uds", "s.sock", "--config", "further.toml") as server:
        (url,) = [line.rpartition(" ")[2].strip() for line in server.lines if "listening on http" in line]
        with httpx.Client(base_url=url, timeout=20) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert server.stop() == 0

    (tmp_path / "further.toml").write_text(f"server = {{extra_ports = [{url.rpartition(':')[2]}]}}\n")
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        assert "server.extra_ports: cannot listen on 127.0.0.1" in refusal(tmp_path, "--config", "further.toml")


def test_commands_reach_a_socket_file(tmp_path: Path) -> None:
    url = f"unix:{tmp_path}/s.sock"
    with serve(tmp_path, "--uds", str(tmp_path / "s.sock")):
        assert json.loads(run("models", "list", "--json", "--url", url))["data"][0]["id"] == "m"
        assert "Nothing is running" in run("requests", "list", "--url", url)
        assert run("chat", "--url", url, question="hi").strip() == "Hello"


def test_a_file_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serve(tmp_path, "--uds", str(path)) as server:
        server.stop(signal.SIGKILL)
    assert path.exists()
    with serve(tmp_path, "--uds", str(path)), unix_client(path) as client:
        assert client.get("/health").status_code == 200


def test_files_that_are_used_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serve(tmp_path, "--uds", str(path)) as server, unix_client(path) as client:
        assert f"server.uds: another server listens on {path}" in refusal(tmp_path, "--uds", str(path))
        assert client.get("/health").status_code == 200
        path.unlink()  # by somebody, who then starts another one
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            assert server.stop() == 0
            assert path.exists()
    plain = tmp_path / "plain"
    plain.write_text("mine")
    with pytest.raises(ConfigError, match=r"server\.uds: .*plain exists and is not a socket"):
        listen(ServerSettings(uds=str(plain)))
    assert plain.read_text() == "mine"


@pytest.mark.parametrize("name", ["none/s.sock", "x" * 200])
def test_socket_files_that_cannot_be_made_name_the_setting(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.uds: cannot listen on"):
        listen(ServerSettings(uds=str(tmp_path / name)))


def test_a_socket_file_takes_the_place_of_a_port(tmp_path: Path) -> None:
    assert "--uds takes the place of --host and --port" in refusal(tmp_path, "--uds", "s", "--port", "8080")


def test_settings_of_a_socket_file(tmp_path: Path) -> None:
    config = tmp_path / "conf" / "enginehouse.toml"
    config.parent.mkdir()
    config.write_text('[server]\nuds = "s.sock"\nuds_mode = "0660"\nhost = "0.0.0.0"\n')  # which needs no keys then
    settings = load_settings(config, {})
    assert settings.server.uds == str(tmp_path / "conf" / "s.sock")

    with server_thread(settings) as server:
        assert server.url == f"unix:{settings.server.uds}"
        assert stat.S_IMODE(Path(settings.server.uds).stat().st_mode) == 0o660
    for mode in ("rw", "1777", "8", ""):
        with pytest.raises(ConfigError, match=r"server\.uds_mode: .*octal"):
            load_settings(None, {"ENGINEHOUSE_SERVER__UDS_MODE": mode})


# -- IPv6 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_ipv6_with_and_without_brackets(tmp_path: Path, host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serve(tmp_path, "--host", host, "--port", "0") as server:
        url = next(line for line in server.lines if "listening on" in line).split()[-1]
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/admin/models", timeout=60).status_code == 200
        for name in (url.removeprefix("http://"), "[::1]", "[0:0:0:0:0:0:0:1]:80"):
            assert httpx.get(f"{url}/v1/models", headers={"host": name}, timeout=60).status_code == 200
        assert json.loads(run("models", "list", "--json", "--url", url))["data"][0]["id"] == "m"


@pytest.mark.parametrize("host", ["[::1", "::1]", "[localhost]", "[]"])
def test_other_brackets_are_no_address(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as refused:
        listen(ServerSettings(host=host, port=0))
    assert refused.value.path == "server.host"


# -- TLS -------------------------------------------------------------------------------------------


@define
class Certificate:
    folder: Path
    cert: str
    key: str
    encrypted_key: str

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.cert)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate of this machine that signs itself, made with the openssl command."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    made = Certificate(folder, *(str(folder / name) for name in ("cert.pem", "key.pem", "encrypted.pem")))
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    commands = [
        [*new, *names, "-keyout", made.key, "-out", made.cert],
        ["rsa", "-aes256", "-passout", "pass:secret", "-in", made.key, "-out", made.encrypted_key],
        [*new, "-keyout", str(folder / "other-key.pem"), "-out", str(folder / "other-cert.pem")],
    ]
    for command in commands:
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return made


@pytest.fixture
def tls_settings(tmp_path: Path, certificate: Certificate) -> Settings:
    return Settings(
        server=ServerSettings(ssl_certfile=certificate.cert, ssl_keyfile=certificate.key, head_timeout_s=1.0),
        models={"m": ModelSettings(source=write_script(tmp_path / "m.json", ["Hel", "lo"]), backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )


def test_tls_by_the_command_line(tmp_path: Path, certificate: Certificate) -> None:
    both = ("--ssl-certfile", certificate.cert, "--ssl-keyfile", certificate.key)
    with serve(tmp_path, "--port", "0", *both) as server:
        url = next(line for line in server.lines if "listening on" in line).split()[-1]
        assert url.startswith("https://127.0.0.1:")
        assert f"{url}/v1" in server.lines[-1]
        with httpx.Client(base_url=url, verify=certificate.context, timeout=60) as client:
            with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
                assert stream.read().endswith(b"data: [DONE]\n\n")
            assert client.get("/admin/models", headers={"origin": url}).status_code == 200
            assert client.get("/admin/models", headers={"origin": url.replace("https", "http")}).status_code == 403
        trusted = {"SSL_CERT_FILE": certificate.cert}
        assert json.loads(run("models", "list", "--json", "--url", url, env=trusted))["data"][0]["id"] == "m"
        assert run("chat", "--url", url, question="hi", env=trusted).strip() == "Hello"
        assert server.stop() == 0
        assert not [line for line in server.lines if "Traceback" in line or "error" in line.lower()]


def test_certificate_and_key_may_be_one_file(tls_settings: Settings, certificate: Certificate, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate.cert).read_text() + Path(certificate.encrypted_key).read_text())
    server = ServerSettings(ssl_certfile=str(both), ssl_keyfile_password="secret")
    with server_thread(Settings(server=server, models=tls_settings.models, plugins=tls_settings.plugins)) as running:
        assert httpx.get(f"{running.url}/v1/models", verify=certificate.context, timeout=60).status_code == 200


def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(
    tls_settings: Settings, certificate: Certificate
) -> None:
    server = ServerSettings(ssl_certfile=certificate.cert, ssl_keyfile=certificate.key, ssl_ca_certs=certificate.cert)
    with server_thread(Settings(server=server, models=tls_settings.models, plugins=tls_settings.plugins)) as running:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{running.url}/health", verify=certificate.context, timeout=60)
        context = certificate.context
        context.load_cert_chain(certificate.cert, certificate.key)
        assert httpx.get(f"{running.url}/v1/models", verify=context, timeout=60).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_what_is_no_handshake_is_closed(tls_settings: Settings, certificate: Certificate, sent: bytes, caplog) -> None:
    """Half a handshake within head_timeout_s; others are served meanwhile."""
    with server_thread(tls_settings) as running:
        port = int(running.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            began = time.monotonic()
            connection.sendall(sent)
            assert httpx.get(f"{running.url}/v1/models", verify=certificate.context, timeout=60).status_code == 200
            rest = connection.makefile("rb").read()  # a reset would raise
            took_s = time.monotonic() - began
    assert took_s < 30
    assert b"HTTP" not in rest
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_files_that_cannot_be_used_name_their_setting(tmp_path: Path, certificate: Certificate) -> None:
    cert, key, encrypted = certificate.cert, certificate.key, certificate.encrypted_key
    other = str(certificate.folder / "other-key.pem")
    junk = str(tmp_path / "junk.pem")
    Path(junk).write_text("junk")
    for certfile, keyfile, said in (
        ("/none.pem", key, "server.ssl_certfile: cannot read /none.pem: No such file"),
        (cert, "/none.pem", "server.ssl_keyfile: cannot read /none.pem"),
        (str(tmp_path), key, f"server.ssl_certfile: cannot read {tmp_path}"),
        (junk, key, f"server.ssl_certfile: {junk} holds no certificate"),
        (key, key, f"server.ssl_certfile: {key} holds no certificate"),
        (cert, junk, f"server.ssl_keyfile: the private key in {junk} cannot be used"),
        (cert, other, f"server.ssl_keyfile: {other} is not the key of the certificate in {cert}"),
        (cert, encrypted, f"server.ssl_keyfile: the private key in {encrypted} cannot be used"),
        (cert, None, f"server.ssl_certfile: the private key in {cert} cannot be used"),
        (None, key, "server.ssl_keyfile: server.ssl_certfile must be set as well"),
    ):
        with pytest.raises(ConfigError) as refused:
            listen(ServerSettings(port=0, ssl_certfile=certfile, ssl_keyfile=keyfile))
        assert refused.value.message.startswith(said)
        assert refused.value.path == said.partition(":")[0]
    with pytest.raises(ConfigError, match=r"server\.ssl_ca_certs: .*junk\.pem holds no certificates"):
        listen(ServerSettings(port=0, ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=junk))


def test_an_encrypted_key_asks_nobody(tmp_path: Path, certificate: Certificate) -> None:
    """OpenSSL itself would ask for the password on the terminal."""
    files = ("--ssl-certfile", certificate.cert, "--ssl-keyfile", certificate.encrypted_key)
    said = refusal(tmp_path, "--port", "0", *files)

    assert "its password must be server.ssl_keyfile_password" in said
    assert "pass phrase" not in said


# -- behind a proxy --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("below")
    settings = Settings(
        server=ServerSettings(root_path="/tools/llm", allowed_hosts=("host.docker.internal",)),
        auth=AuthSettings(keys=("k",)),
        models={"m": ModelSettings(source=write_script(folder / "m.json", ["Hel", "lo"]), backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=20) as client:
        yield client


@pytest.mark.parametrize("prefix", ["/tools/llm", "", "/tools%2Fllm", "/%74ools/llm"])
def test_a_prefix_may_be_taken_away_by_the_proxy_or_not(below: httpx.Client, prefix: str) -> None:
    key = {"authorization": "Bearer k"}

    assert below.get(f"{prefix}/health").status_code == 200
    assert below.get(f"{prefix}/v1/models").status_code == 401
    assert below.get(f"{prefix}/metrics").status_code == 401
    for path in ("/v1/chat/completions", "/chat/completions", "/compat/octomil/v1/chat/completions"):
        answer = below.post(prefix + path, json=CHAT, headers=key)
        assert answer.status_code == 200, path
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert below.get(f"{prefix}/v1/models/m", headers=key).json()["id"] == "m"
    assert below.get(f"{prefix}/v1/models", headers={**key, "host": "evil.example"}).status_code == 403
    document = below.get(f"{prefix}/schema", headers=key).json()
    assert document["servers"] == [{"url": "/tools/llm/v1"}, {"url": "/tools/llm"}]
    assert document["paths"]["/health"]["servers"] == [{"url": "/tools/llm"}]


@pytest.mark.parametrize(
    "path", ["/tools/llm", "/tools/llm/", "/tools", "/tools/llmx/v1/models", "/llm/v1/models", "/v1/tools/llm/models"]
)
def test_other_prefixes_do_not_exist(below: httpx.Client, path: str) -> None:
    assert below.get(path).status_code == 401
    assert below.get(path, headers={"authorization": "Bearer k"}).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/a/../b", "/a b", "/a%20b", "http://x/llm"])
def test_root_paths_that_never_match_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.root_path: must be a path such as /llm"):
        load_settings(None, {"ENGINEHOUSE_SERVER__ROOT_PATH": path})


def test_hosts_that_settings_list_are_answered_with_any_port(below: httpx.Client) -> None:
    key = {"authorization": "Bearer k"}
    for host in ("host.docker.internal", "host.docker.internal:8080", "Host.Docker.Internal:1"):
        assert below.get("/v1/models", headers={**key, "host": host}).status_code == 200
    refused = below.get("/v1/models", headers={**key, "host": "gateway.docker.internal:8080"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "host_not_allowed")
    assert "'gateway.docker.internal'" in error["message"] and "server.allowed_hosts" in error["message"]
