"""Files in folders that others may write to.

No link is followed, and modes do not depend on the umask.
"""

import os
import stat

import pytest

from tests.prefetch.test_checkpoint import CARD, FOLDED
from tests.trace.test_trace import make_trace
from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.durable import replace_file
from vllm_dymoe.prefetch.checkpoint import save_predictor

WRITERS = {
    "trace": lambda path: make_trace().save(path),
    "predictor": lambda path: save_predictor(path, CARD, FOLDED),
    "rows": lambda path: append_row(path, {"key": "a"}),
    "replaced": lambda path: replace_file(path, b"new"),
}


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "victim").write_bytes(b"mine")
    return tmp_path / "victim"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("planted", ["", ".incomplete", ".unfinished", ".0"])
def test_a_planted_link_is_not_written_through(name, planted, victim, tmp_path):
    (tmp_path / "shared").mkdir()
    path = tmp_path / "shared" / "file"
    path.with_name(path.name + planted).symlink_to(victim)
    try:
        WRITERS[name](path)
    except OSError:
        assert not planted, "only the file itself is in the way"
    else:
        assert path.is_file()
        assert not path.is_symlink()
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("name", WRITERS)
def test_modes_do_not_follow_the_umask(name, umask, tmp_path):
    before = os.umask(umask)
    try:
        WRITERS[name](tmp_path / "file")
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tmp_path / "file").stat().st_mode)
    assert mode == (0o600 if name == "trace" else 0o644), "a trace tells about prompts"


def leave_temporary(path, monkeypatch):
    """Die within ``replace_file``; return what it leaves, which is old."""
    before = set(path.parent.iterdir())

    def die(*_):
        raise InterruptedError

    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", die)
        killed.setattr(os, "unlink", die)
        with pytest.raises(InterruptedError):
            replace_file(path, b"begun")
    (left,) = set(path.parent.iterdir()) - before
    os.utime(left, (0, 0))
    return left


def test_old_temporary_files_are_removed_and_other_files_with_similar_names_stay(tmp_path, monkeypatch):
    path = tmp_path / "file"
    others = {path.with_name(name) for name in ("file.bak", "file.tar.gz", ".file.swp", "file.dymoe-partial", "other")}
    for other in others:
        other.write_bytes(b"mine")
        os.utime(other, (0, 0))
    left = leave_temporary(path, monkeypatch)
    replace_file(path, b"new")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_temporary_file_that_may_be_in_use_stays(tmp_path, monkeypatch):
    left = leave_temporary(tmp_path / "file", monkeypatch)
    os.utime(left)
    replace_file(tmp_path / "file", b"new")
    assert left.exists()
