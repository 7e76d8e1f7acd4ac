"""JSON lines that survive torn tails, full disks and several writers."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from rlkit.errors import RunError
from rlkit.runs.log import LineCursor, LineWriter, append_shared, parse_line


def lines_of(cursor: LineCursor) -> list[object]:
    return [parse_line(line) for _, line in cursor.lines()]


def test_a_cursor_gives_each_complete_line_once(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    writer, cursor = LineWriter(path), LineCursor(path)
    assert lines_of(cursor) == []
    writer.write({"n": 1}, {"n": 2})
    assert lines_of(cursor) == [{"n": 1}, {"n": 2}]
    writer.write({"text": "é\n"})
    assert lines_of(cursor) == [{"text": "é\n"}]
    assert lines_of(cursor) == []


def test_a_torn_last_line_is_left_for_later(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":')
    cursor = LineCursor(path)
    assert lines_of(cursor) == [{"n": 1}]
    with open(path, "ab") as stream:
        stream.write(b"2}\n")
    assert lines_of(cursor) == [{"n": 2}]


@pytest.mark.parametrize("torn", [b'{"n":', b"x" * 200_000, b"\0" * 10, b"7"])
def test_the_next_writer_cuts_a_torn_tail_off(tmp_path: Path, torn: bytes):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}\n' + torn)
    LineWriter(path).write({"n": 2})
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n')
    LineWriter(path).write({"n": 2})
    assert path.read_bytes() == b'{"n":2}\n'


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":1}')
    LineWriter(path).write({"n": 2})
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_long_files_are_read_in_pieces_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlkit.runs.log._CHUNK", 64)
    path = tmp_path / "log.jsonl"
    records = [{"n": number, "pad": "x" * (number % 200)} for number in range(300)]
    LineWriter(path).write(*records)
    assert lines_of(LineCursor(path)) == records


def test_a_cursor_stopped_half_way_goes_on_from_there(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    LineWriter(path).write({"n": 1}, {"n": 2}, {"n": 3})
    cursor = LineCursor(path)
    next(cursor.lines())
    assert lines_of(cursor) == [{"n": 2}, {"n": 3}]


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    LineWriter(path).write({"n": 1}, {"n": 2})
    cursor = LineCursor(path)
    lines_of(cursor)
    path.write_bytes(b'{"n":9}\n')
    assert lines_of(cursor) == [{"n": 9}]
    assert cursor.restarts == 1


def test_a_full_disk_is_an_error_and_the_writer_goes_on_when_there_is_room(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    writer = LineWriter(path)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write({"n": 1})
    assert caught.value.errno == errno.ENOSPC
    path.unlink()
    writer.write({"n": 1})
    assert path.read_bytes() == b'{"n":1}\n'


def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "log.jsonl"
    writer = LineWriter(path)
    writer.write({"n": 1})
    real, calls = os.write, []

    def half(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, bytes(data)[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            writer.write({"n": 2})
    assert path.read_bytes() == b'{"n":1}\n'
    writer.write({"n": 2})
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_a_shared_file_closes_off_another_writers_torn_line(tmp_path: Path):
    path = tmp_path / "control.jsonl"
    path.write_bytes(b'{"id": "a')
    append_shared(path, {"id": "b"})
    assert lines_of(LineCursor(path)) == [None, {"id": "b"}]


def _append_many(path: Path, name: str) -> None:
    for number in range(200):
        append_shared(path, {"id": f"{name}{number}", "pad": "x" * 50})


def test_many_processes_append_whole_lines(tmp_path: Path):
    path = tmp_path / "control.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(path, name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ids = [json.loads(line)["id"] for line in path.read_bytes().splitlines()]
    assert sorted(ids) == sorted(f"{name}{number}" for name in "abc" for number in range(200))


def test_a_request_to_a_full_disk_says_so(tmp_path: Path):
    path = tmp_path / "control.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device; nothing was sent"):
        append_shared(path, {"id": "a"})
    with pytest.raises(RunError, match="still a run folder"):
        append_shared(tmp_path / "gone" / "control.jsonl", {"id": "a"})
