"""One saved sequence as a file: whole or not at all, and nothing else is taken for it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from enginehouse.engine.disk.state_folder import DamagedFile, StateHead, digest, read_head, read_state, write_state

MODEL, NAMESPACE = digest(b"model"), digest(b"namespace")
STATE = bytes(range(256)) * 8


def head_of(num_tokens: int = 100) -> StateHead:
    return StateHead(MODEL, NAMESPACE, np.arange(num_tokens, dtype=np.int32), len(STATE))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "one.state"
    write_state(path, head_of(), memoryview(STATE))
    return path


def test_what_was_written_is_read(path: Path) -> None:
    head = read_head(path, MODEL)

    assert (head.model, head.namespace, head.num_state_bytes) == (MODEL, NAMESPACE, len(STATE))
    assert head.token_ids.tolist() == list(range(100))
    assert head.num_file_bytes == path.stat().st_size
    assert bytes(read_state(path, head)) == STATE
    assert not read_state(path, head).readonly


def test_only_its_owner_may_read_it(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_bit_is_noticed(path: Path) -> None:
    """Wherever it is: in the head by reading that, else by the checksum."""
    whole = path.read_bytes()
    head = read_head(path, MODEL)
    for place in (0, 7, 8, 30, 41, 60, 300, 1000, len(whole) - 17, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedFile):
            read_state(path, head)


@pytest.mark.parametrize("num_bytes", [0, 1, 51, 52, 100, 2000, -1])
def test_a_shortened_file_is_damaged(path: Path, num_bytes: int) -> None:
    head = read_head(path, MODEL)
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(DamagedFile):
        read_head(path, MODEL)
    with pytest.raises(DamagedFile):
        read_state(path, head)


def test_a_longer_file_is_damaged(path: Path) -> None:
    head = read_head(path, MODEL)
    path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(DamagedFile):
        read_head(path, MODEL)
    with pytest.raises(DamagedFile):
        read_state(path, head)


def test_a_file_of_another_model_is_foreign(path: Path) -> None:
    with pytest.raises(DamagedFile, match="another model"):
        read_head(path, digest(b"another model"))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.state"
    write_state(path, head_of(), memoryview(STATE))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_state(path, head_of(50), memoryview(STATE))

    assert os.listdir(tmp_path) == ["one.state"]
    assert len(read_head(path, MODEL).token_ids) == 100, "the old file is still there"


def test_digests_know_where_parts_end() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")
