"""All files of one model: found by what they hold, bounded, and cleared of what is of no use."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from enginehouse.engine.disk import state_folder
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS, FolderTaken, StateFolder, digest

MODEL = digest(b"model")
STATE = memoryview(b"s" * 1000)


def tokens(first: int, num_tokens: int = 100) -> np.ndarray:
    """Token ids that begin unlike those of any other ``first``."""
    return np.arange(1000 * first, 1000 * first + num_tokens, dtype=np.int32)


def open_folder(path: Path, model: bytes = MODEL, max_bytes: int = 10**6, can_cut: bool = True) -> StateFolder:
    return StateFolder(path / "m", model, max_bytes, can_cut=can_cut)


def files(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path / "m") if name != "lock")


def test_saved_sequences_are_found_after_a_restart(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert folder.write(tokens(1), "", STATE)
    assert folder.write(tokens(2), "", STATE)
    folder.close()
    folder = open_folder(tmp_path)
    found = folder.find(tokens(1, 80), "")

    assert len(folder) == 2
    assert found is not None
    assert found[1] == 80
    data = folder.read(found[0])
    assert data is not None
    assert bytes(data) == bytes(STATE)
    folder.close()


def test_the_folder_is_its_owners(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o755)
    folder = open_folder(tmp_path)
    folder.write(tokens(1), "", STATE)

    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()} == {0o600}
    folder.close()


def test_namespaces_never_mix(tmp_path: Path) -> None:
    """Nor does a file tell their names, which may hold secrets."""
    folder = open_folder(tmp_path)
    folder.write(tokens(1), "alice\0secret salt", STATE)

    assert folder.find(tokens(1), "alice\0secret salt") is not None
    assert folder.find(tokens(1), "alice\0") is None
    assert folder.find(tokens(1), "") is None
    assert b"secret" not in (tmp_path / "m" / files(tmp_path)[0]).read_bytes()
    folder.close()


def test_the_longest_beginning_is_found_the_smallest_of_equals(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    common = tokens(1, 100)
    for number, own in ((2, 500), (3, 30)):
        folder.write(np.concatenate([common, tokens(number, own)]), "", STATE)
    found = folder.find(np.concatenate([common, tokens(4, 10)]), "")
    longest = folder.find(np.concatenate([common, tokens(2, 5)]), "")

    assert found is not None
    assert (found[0].num_tokens, found[1]) == (130, 100)
    assert longest is not None
    assert (longest[0].num_tokens, longest[1]) == (600, 105)
    folder.close()


def test_states_that_cannot_be_cut_are_of_use_only_whole(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, can_cut=False)
    folder.write(tokens(1, 100), "", STATE)
    folder.write(tokens(1, 200), "", STATE)

    assert len(folder) == 2, "the shorter one is still needed"
    assert folder.find(tokens(1, 90), "") is None
    found = folder.find(tokens(1, 150), "")
    assert found is not None
    assert found[1] == found[0].num_tokens == 100
    folder.close()


def test_a_longer_sequence_replaces_its_beginning(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write(tokens(1, 100), "", STATE)
    folder.write(tokens(1, 200), "", STATE)
    folder.write(tokens(1, 200), "", STATE)

    assert len(folder) == len(files(tmp_path)) == 1
    assert folder.holds(tokens(1, 150), "")
    assert not folder.holds(tokens(1, 201), "")
    assert folder.num_bytes == sum(path.stat().st_size for path in (tmp_path / "m").glob("*.state"))
    folder.close()


def test_the_size_is_bounded_by_last_use(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, max_bytes=3 * 1500)
    for number in (1, 2, 3):
        folder.write(tokens(number), "", STATE)
        os.utime(sorted((tmp_path / "m").glob("*.state"), key=lambda p: p.stat().st_mtime_ns)[-1])
    oldest = folder.find(tokens(1), "")
    assert oldest is not None
    assert folder.read(oldest[0]) is not None  # now the last used
    folder.write(tokens(4), "", STATE)

    assert [folder.find(tokens(number), "") is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert folder.num_bytes <= 3 * 1500
    folder.close()
    smaller = open_folder(tmp_path, max_bytes=1500)
    assert len(smaller) == len(files(tmp_path)) == 1, "a smaller bound holds from the start on"
    smaller.close()


def test_what_is_larger_than_everything_is_not_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, max_bytes=1200)

    assert not folder.write(tokens(1), "", memoryview(bytes(1100)))
    assert files(tmp_path) == []
    folder.close()


def test_useless_files_are_removed_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = open_folder(tmp_path, model=digest(b"yesterday's model"))
    folder.write(tokens(1), "", STATE)
    folder.close()
    place = tmp_path / "m"
    (place / "garbage.state").write_bytes(b"\xff" * 2000)
    (place / "empty.state").write_bytes(b"")
    (place / "half-written.tmp").write_bytes(b"EHstate1")
    (place / "notes.txt").write_text("not ours")
    with caplog.at_level(logging.WARNING):
        folder = open_folder(tmp_path)

    assert len(folder) == 0
    assert files(tmp_path) == ["notes.txt"]
    assert sum("ignored and removed" in record.message for record in caplog.records) == 3
    folder.close()


def test_a_file_that_was_damaged_meanwhile_is_removed_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(tmp_path)
    folder.write(tokens(1), "", STATE)
    folder.write(tokens(2), "", STATE)
    found, gone = folder.find(tokens(1), ""), folder.find(tokens(2), "")
    assert found is not None
    assert gone is not None
    data = bytearray(found[0].path.read_bytes())
    data[-100] ^= 1
    found[0].path.write_bytes(data)
    gone[0].path.unlink()

    assert folder.read(found[0]) is None
    assert folder.read(gone[0]) is None
    assert len(folder) == folder.num_bytes == 0
    assert files(tmp_path) == []
    assert "checksum" in caplog.text
    folder.close()


def test_a_full_disk_costs_only_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(tmp_path)
    folder.write(tokens(1), "", STATE)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_folder, "write_state", full)
    assert not folder.write(tokens(2), "", STATE)
    monkeypatch.undo()

    assert "No space left" in caplog.text
    assert folder.write(tokens(3), "", STATE)
    assert [folder.find(tokens(number), "") is not None for number in (1, 2, 3)] == [True, False, True]
    folder.close()


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    with pytest.raises(FolderTaken):
        open_folder(tmp_path)
    folder.close()

    open_folder(tmp_path).close()


def test_short_prompts_find_nothing(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write(tokens(1), "", STATE)

    assert folder.find(tokens(1, MIN_SAVED_TOKENS - 1), "") is None
    assert folder.find(tokens(1, MIN_SAVED_TOKENS), "") is not None
    folder.close()
