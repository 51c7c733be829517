"""Downloads against a hub that runs here: what is fetched, what goes wrong, and what is left then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.client import HubClient
from enginehouse_hub.hub import HuggingFaceHub
from enginehouse_hub.listing import HubFile
from enginehouse_hub.pulling import Pulled, pull
from enginehouse_hub.reference import parse_reference
from enginehouse_hub.refusals import HubUnreachable
from enginehouse_testkit.stand_in_hub import StandIn, commit_of, digest_of

from .conftest import GGUF, SAFETENSORS, WEIGHTS


class Report:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.total = self.done = -1
        self.files: list[str] = []
        self.notes: list[str] = []

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        self.total, self.done = num_bytes, num_bytes_here

    def file(self, file: HubFile) -> None:
        self.files.append(file.path)

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def report() -> Report:
    return Report()


def fetch(hub: StandIn, text: str, report: Report | None = None, token: str | None = None, **options: bool) -> Pulled:
    reference = parse_reference(text)
    assert reference is not None
    return pull(reference, HubClient(hub.url, token, timeout_s=20), report or Report(), pauses_s=(0.0,) * 3, **options)


def test_model_is_fetched_whole_and_found_as_a_source(hub: StandIn, downloads: Path, report: Report) -> None:
    pulled = fetch(hub, "owner/plain", report)
    folder = downloads / "models--owner--plain" / "snapshots" / commit_of("main")

    assert pulled.folder == folder == HuggingFaceHub().find("owner/plain")
    assert pulled.commit == commit_of("main")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {file.name for file in folder.iterdir()} == {file.path for file in pulled.files}
    assert not (folder / "pytorch_model.bin").exists()
    assert (report.total, report.done) == (pulled.num_bytes_fetched, pulled.num_bytes_fetched)


def test_cache_is_laid_out_as_the_hubs_own_tools_do(hub: StandIn, downloads: Path) -> None:
    fetch(hub, "owner/plain")
    cache, commit = downloads / "models--owner--plain", commit_of("main")

    assert (cache / "refs" / "main").read_text() == commit
    assert (cache / "blobs" / digest_of("model.safetensors", WEIGHTS)).is_file()
    link = cache / "snapshots" / commit / "config.json"
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../blobs/{digest_of('config.json', SAFETENSORS['config.json'])}"
    assert not list(cache.rglob("*.incomplete"))


def test_hubs_own_library_finds_the_model(hub: StandIn, downloads: Path) -> None:
    fetch(hub, "owner/plain")
    options = {"cache_dir": str(downloads), "local_files_only": True}

    assert Path(hf_hub_download("owner/plain", "model.safetensors", **options)).read_bytes() == WEIGHTS
    assert snapshot_download("owner/plain", **options).endswith(commit_of("main"))


def test_what_is_here_is_not_fetched_again(hub: StandIn, report: Report) -> None:
    fetch(hub, "owner/plain")
    hub.asked.clear()
    again = fetch(hub, "owner/plain", report)

    assert again.num_bytes_fetched == 0
    assert hub.contents_asked() == []
    assert report.files == []


def test_revisions_share_what_they_have_in_common(hub: StandIn) -> None:
    fetch(hub, "owner/plain")
    hub.asked.clear()
    old = fetch(hub, "owner/plain@v1.0")

    assert hub.contents_asked() == [("model.safetensors", 0)]
    assert (old.folder / "model.safetensors").read_bytes() == b"first"
    assert HuggingFaceHub().find("owner/plain:v1.0") == HuggingFaceHub().find("owner/plain@v1.0") == old.folder


def test_pinned_commit_that_is_here_asks_the_hub_nothing(hub: StandIn) -> None:
    pinned = f"owner/plain@{commit_of('main')}"
    fetch(hub, pinned)
    hub.asked.clear()
    again = fetch(hub, pinned)

    assert hub.asked == []
    assert HuggingFaceHub().find(pinned) == again.folder


def test_one_quantisation_is_fetched_with_its_parts_only(hub: StandIn, downloads: Path) -> None:
    fetch(hub, "owner/packed:F16")
    path = HuggingFaceHub().find("owner/packed:F16")

    assert path is not None
    assert path.name == "m-F16-00001-of-00002.gguf"
    assert path.with_name("m-F16-00002-of-00002.gguf").read_bytes() == GGUF["F16/m-F16-00002-of-00002.gguf"]
    assert len(list((downloads / "models--owner--packed" / "blobs").iterdir())) == 2


def test_branch_that_moved_is_followed(hub: StandIn) -> None:
    first = fetch(hub, "owner/plain")
    hub.repositories["owner/plain"].revisions["next"] = {**SAFETENSORS, "config.json": b'{"new": 1}'}
    hub.repositories["owner/plain"].newer = {"main": "next"}
    hub.asked.clear()
    second = fetch(hub, "owner/plain")

    assert second.commit != first.commit
    assert hub.contents_asked() == [("config.json", 0)]
    assert HuggingFaceHub().find("owner/plain") == second.folder


# -- broken off ------------------------------------------------------------------------------------


def test_cut_connections_go_on_where_they_ended(hub: StandIn, report: Report) -> None:
    hub.cut_after, hub.num_cuts = {"model.safetensors": 1_000_000}, 2
    pulled = fetch(hub, "owner/plain", report)
    starts = [start for name, start in hub.contents_asked() if name == "model.safetensors"]

    assert starts == [0, 1_000_000, 2_000_000]
    assert (pulled.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert report.done == report.total
    assert any("closed within model.safetensors" in note for note in report.notes)


def test_failed_download_goes_on_with_the_next_command(hub: StandIn, downloads: Path, report: Report) -> None:
    incomplete = downloads / "models--owner--plain/blobs" / f"{digest_of('model.safetensors', WEIGHTS)}.incomplete"
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(WEIGHTS[:1_234_567])
    hub.cut_after, hub.num_cuts = {"model.safetensors": 0}, 1000
    with pytest.raises(HubUnreachable, match=r"closed within model\.safetensors"):
        fetch(hub, "owner/plain")
    assert HuggingFaceHub().find("owner/plain") is None  # no half of a model is shown
    hub.num_cuts = 0
    hub.asked.clear()
    pulled = fetch(hub, "owner/plain", report)

    assert hub.contents_asked() == [("model.safetensors", 1_234_567)]
    assert pulled.num_bytes_fetched == len(WEIGHTS) - 1_234_567
    assert report.done == report.total


def test_server_that_cannot_begin_in_the_middle_starts_over(hub: StandIn, report: Report) -> None:
    hub.cut_after, hub.num_cuts, hub.ranges = {"model.safetensors": 1_000_000}, 1, False
    pulled = fetch(hub, "owner/plain", report)

    assert (pulled.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert report.done == report.total


def test_damaged_beginning_is_noticed_and_fetched_again(hub: StandIn, downloads: Path, report: Report) -> None:
    incomplete = downloads / "models--owner--plain/blobs" / f"{digest_of('model.safetensors', WEIGHTS)}.incomplete"
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(b"x" * 1000)
    pulled = fetch(hub, "owner/plain", report)

    assert (pulled.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert any("damaged; fetching it again" in note for note in report.notes)
    assert report.done == report.total


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_with_a_wrong_byte_never_counts(hub: StandIn, downloads: Path, name: str) -> None:
    hub.spoiled = {name}
    with pytest.raises(DownloadError, match=f"{name} is damaged"):
        fetch(hub, "owner/plain")

    assert HuggingFaceHub().find("owner/plain") is None
    assert not (downloads / "models--owner--plain/blobs" / digest_of(name, SAFETENSORS[name])).exists()


def test_two_at_a_time_fetch_everything_once(hub: StandIn) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetch(hub, "owner/plain").folder)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(folders)) == 1
    assert len(folders) == 3
    assert sorted({name for name, _ in hub.contents_asked()}) == sorted(name for name, _ in hub.contents_asked())


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "token", "message"),
    [
        ("owner/absent", None, "model 'owner/absent' not found at http.*HF_TOKEN"),
        ("owner/absent", "hf_right", "model 'owner/absent' not found at http.*token may not see it"),
        ("owner/private", None, "model 'owner/private' not found"),
        ("owner/private", "hf_other", "model 'owner/private' not found"),
        ("owner/plain@v9", None, "owner/plain has no branch, tag or commit 'v9'"),
        ("owner/gated", None, r"is gated: accept its terms at http\S+/owner/gated, and set HF_TOKEN"),
        ("owner/gated", "hf_other", r"is gated: the account of the token that was sent must accept its terms"),
        ("owner/plain", "hf_wrong", "refuses the token"),
        ("owner/pickles", None, "pickles only"),
        ("owner/packed", None, "holds several models; name one"),
    ],
)
def test_refusals_say_what_to_do(hub: StandIn, text: str, token: str | None, message: str) -> None:
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(hub, text, token=token)

    assert token is None or token not in str(caught.value)


@pytest.mark.parametrize("model", ["owner/gated", "owner/private"])
def test_right_token_is_accepted_and_goes_to_the_hub_only(hub: StandIn, model: str) -> None:
    fetch(hub, model, token="hf_right")
    by_host = {asked.host: asked.token for asked in hub.asked}

    assert by_host == {"127.0.0.1": "hf_right", "localhost": None}


def test_renamed_repository_is_followed_with_the_token(hub: StandIn) -> None:
    hub.moved = {"owner/before": "owner/gated"}
    assert fetch(hub, "owner/before", token="hf_right").num_bytes_fetched > len(WEIGHTS)


def test_repository_that_leads_to_itself_is_an_error(hub: StandIn) -> None:
    hub.moved = {"owner/round": "owner/round"}
    with pytest.raises(DownloadError, match="answers 307"):
        fetch(hub, "owner/round")

    assert len(hub.asked) == 10


def test_full_disk_is_noticed_before_the_first_byte(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr("enginehouse_hub.pulling.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"0.00 GB must be fetched, but only 0.00 GB are free in .*HF_HOME"):
        fetch(hub, "owner/plain")

    assert hub.contents_asked() == []


def test_hub_that_is_away_is_an_error_only_where_nothing_is_here(hub: StandIn) -> None:
    hub.status = 503
    with pytest.raises(HubUnreachable, match="503"):
        fetch(hub, "owner/plain")
    hub.status = None
    first = fetch(hub, "owner/plain")
    hub.status = 503
    again = fetch(hub, "owner/plain")

    assert again.folder == first.folder
    assert "may be older than the hub's" in again.note


def test_offline_asks_nobody(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(hub, "owner/packed:Q4_K_M")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert "HF_HUB_OFFLINE" in fetch(hub, "owner/packed:Q4_K_M").note
    with pytest.raises(DownloadError, match="owner/packed:Q8_0 is not here, and HF_HUB_OFFLINE"):
        fetch(hub, "owner/packed:Q8_0")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        fetch(hub, "owner/plain")
    assert hub.asked == []


def test_half_of_a_model_does_not_count_as_here(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(hub, "owner/packed:F16").folder
    (folder / "F16" / "m-F16-00002-of-00002.gguf").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="is not here"):
        fetch(hub, "owner/packed:F16")


def test_dry_run_fetches_nothing(hub: StandIn, downloads: Path) -> None:
    planned = fetch(hub, "owner/packed:F16", dry_run=True)

    assert [file.path for file in planned.files] == ["F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf"]
    assert not downloads.exists()


_CLIENT = """
from enginehouse_hub.client import HubClient
client = HubClient.from_env()
print(client.endpoint, client.token, "hf_" in repr(client))
"""


def client_of(**env: str) -> list[str]:
    """Endpoint and token in a process with these variables, and whether the token is shown."""
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    return done.stdout.split() or [done.stderr]


def test_client_reads_what_the_hubs_own_tools_read(tmp_path: Path) -> None:
    stored = tmp_path / "home" / "token"
    stored.parent.mkdir()
    stored.write_text("hf_stored\n")
    env = {"HF_HOME": str(stored.parent), "HF_ENDPOINT": "https://mirror.example/hf/"}

    assert client_of(**env) == ["https://mirror.example/hf", "hf_stored", "False"]
    assert client_of(**env, HF_TOKEN="hf_said")[1] == "hf_said"
    assert client_of(**env, HF_HUB_DISABLE_IMPLICIT_TOKEN="1")[1] == "None"
    assert client_of(HF_HOME=str(tmp_path)) == ["https://huggingface.co", "None", "False"]
    assert "HF_ENDPOINT must be an address" in client_of(HF_ENDPOINT="mirror.example")[0]


def test_retries_are_bounded(hub: StandIn, report: Report) -> None:
    hub.cut_after, hub.num_cuts = {"model.safetensors": 0}, 1000
    with pytest.raises(HubUnreachable):
        fetch(hub, "owner/plain", report)

    assert sum(name == "model.safetensors" for name, _ in hub.contents_asked()) == 4
