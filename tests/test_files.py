"""Files written aside: whole or absent, whatever stood there and whatever goes wrong."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from cpflare import files
from cpflare.errors import ConfigError, DataError
from cpflare.files import (
    checksum,
    is_aside,
    leftovers,
    one_line,
    refuse_overwriting,
    remove,
    written_aside,
)


def fill(path, kind, text):
    if kind == "folder":
        path.mkdir()
        path = path / "inside"
    path.write_text(text)


def break_off(path, kind, error, /, **words):
    with written_aside(path, **words) as aside:
        fill(aside, kind, "half")
        raise error


def content(path):
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_stood_there_stays_until_the_new_is_whole(tmp_path, kind):
    path = tmp_path / "made" / "x.vtp"
    for text, former in (("one", None), ("two", "one")):
        with written_aside(path) as aside:
            fill(aside, kind, text)
            assert is_aside(aside)
            assert not path.exists() if former is None else content(path) == former
        assert content(path) == text
    with pytest.raises(KeyError):
        break_off(path, kind, KeyError())
    assert content(path) == "two"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_must_last_is_on_the_disk_before_the_rename_and_the_rename_after_it(
    tmp_path, kind, monkeypatch
):
    path, seen = tmp_path / "x", []
    flush = files._flush
    monkeypatch.setattr(files, "_flush", lambda p: (seen.append((p, path.exists())), flush(p)))
    with written_aside(path, durable=True) as aside:
        fill(aside, kind, "one")
    inside = [(aside / "inside", False)] if kind == "folder" else []
    assert seen == [*inside, (aside, False), (tmp_path, True)]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "x"
    with written_aside(path) as one, written_aside(path) as two:
        one.write_text("one")
        two.write_text("two")
    assert content(path) == "one"  # the outer one is renamed last


def test_what_cannot_be_written_is_one_line_with_the_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/x cannot be written \(.*File exists.*\); free"):
        break_off(tmp_path / "file" / "x", "file", AssertionError("nothing can be begun there"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    words = {"what": "run.dir=a", "mend": "name b", "kind": ConfigError}
    with pytest.raises(ConfigError, match=r"^run.dir=a cannot be .*No space.*; name b$") as caught:
        break_off(tmp_path / "x", "file", full, **words)
    assert caught.value.__cause__ is full
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_leftovers_are_those_of_a_name_from_this_version_and_the_one_before(tmp_path):
    mine = [".run_1.0a1b2c3d.partial", ".run_1.former.partial", ".run_1.partial"]
    for name in (*mine, ".run_10.partial", ".partial", "run_1"):
        (tmp_path / name).mkdir()
    assert [path.name for path in leftovers(tmp_path, "run_1")] == mine
    assert len(leftovers(tmp_path)) == 4
    for path in leftovers(tmp_path):
        remove(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".partial", "run_1"]


def test_checksums_and_lines(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)) * 5000)
    assert checksum(tmp_path / "x") == hashlib.sha256(bytes(range(256)) * 5000).hexdigest()
    assert one_line(ValueError("one\n\n  two\tthree")) == "one two three"
    assert len(one_line("x" * 1000)) == 500


def test_an_output_never_takes_the_place_of_a_source(tmp_path):
    source = tmp_path / "in" / "car.vtp"
    source.parent.mkdir()
    source.write_text("mesh")
    (tmp_path / "linked").symlink_to(source.parent)
    (tmp_path / "soft.vtp").symlink_to(source)
    (tmp_path / "hard.vtp").hardlink_to(source)
    soft, gone = tmp_path / "soft.vtp", tmp_path / "gone.vtp"
    for out, sources in (
        (source, [gone, source]),
        (tmp_path / "linked" / "car.vtp", [source]),
        (tmp_path / "hard.vtp", [source]),
        (soft, [source]),
        (source, [soft]),
        (source.parent, [source]),  # a folder that would be replaced
        (tmp_path / "x" / ".." / "gone.vtp", [gone]),
    ):
        with pytest.raises(DataError, match=r"would overwrite the source.*; name another folder"):
            refuse_overwriting([tmp_path / "new.vtp", out], sources)
    (tmp_path / "copy.vtp").write_text("mesh")
    refuse_overwriting([tmp_path / "copy.vtp", source.parent / "new.vtp"], [source, soft, gone])
    refuse_overwriting(tmp_path / "copy.vtp", [])
