"""Ranks of one machine share one copy of their experts.

The kernel's accounting shows that there is one copy, which ends with the last rank.
"""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import xxhash

from tests.cache.store.stores import write
from tests.small_model import make_experts
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import DamagedStoreError, FileStore, HostMemoryError, StoreError, whole_host_cache
from vllm_dymoe.cache.store.shared import Offer, SharedMemory, Turn
from vllm_dymoe.experts.format import all_keys

EXPERTS = make_experts(layers=3, num_experts=16, hidden=256, intermediate=256)
KEYS = list(all_keys(EXPERTS))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's files and processes")


def runtime_folder():
    """Return the folder of the sockets."""
    return Path(os.environ["XDG_RUNTIME_DIR"]) / f"vllm-dymoe-{os.geteuid()}"


def make_host_cache(folder):
    """Create the lock file next to the store, where ranks that pack a store create it."""
    shared = SharedMemory(folder, Turn(folder))
    host_cache = HostCache(FileStore(folder), whole_host_cache(EXPERTS), shared=shared)
    host_cache.fill()
    return host_cache, shared


def digest(store, packed):
    return xxhash.xxh3_64_hexdigest(b"".join(packed(store, key).numpy().tobytes() for key in KEYS))


def pss():
    """Return this process's share of the shared bytes of experts (PSS).

    The kernel counts memory that n processes map as 1/n for each of them.
    """
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0][-1] != ":":
            ours = "/memfd:dymoe-" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def serve(folder, pipe):
    host_cache, shared = make_host_cache(folder)
    actions = {
        "found": lambda: (shared.found, host_cache.files.counts.reads),
        "digest": lambda: digest(host_cache, HostCache.packed),
        "pss": pss,
        "sleep": host_cache.sleep,
        "wake": host_cache.wake,
    }
    while (asked := pipe.recv()) != "end":
        pipe.send(actions[asked]())


class Rank:
    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(folder, theirs), daemon=True)
        self.process.start()

    def begin(self, asked):
        self._pipe.send(asked)

    def take(self):
        assert self._pipe.poll(60), "the rank has died, or waits for ever"
        return self._pipe.recv()

    def ask(self, asked):
        self.begin(asked)
        return self.take()


def test_ranks_with_the_same_experts_have_them_once_and_the_last_takes_them_along(tmp_path):
    folder = tmp_path / "rank-0-0"
    write(folder, EXPERTS).close()
    ranks = [Rank(folder) for _ in range(2)]
    for rank in ranks:
        rank.begin("found")
    found = [rank.take() for rank in ranks]
    assert sorted(found) == [(False, len(KEYS)), (True, 0)], "one reads, whatever the order"
    first, second = ranks if not found[0][0] else ranks[::-1]
    want = first.ask("digest")
    assert second.ask("digest") == want
    both = [rank.ask("pss") for rank in ranks]
    assert sum(both) == pytest.approx(whole_host_cache(EXPERTS), rel=0.02)
    assert max(both) < 0.6 * sum(both), "each has half of it"
    first.process.kill()
    first.process.join()
    third = Rank(folder)
    assert third.ask("found") == (True, 0), "by what the second has"
    second.ask("sleep")
    assert second.ask("pss") == 0
    assert third.ask("digest") == want
    second.ask("wake")
    assert second.ask("found") == (True, 0)
    assert second.ask("digest") == want
    for rank in (second, third):
        rank.process.kill()
        rank.process.join()
    host_cache, shared = make_host_cache(folder)
    assert not shared.found, "memory outlived its processes"
    assert digest(host_cache, HostCache.packed) == want
    host_cache.close()


def test_a_store_that_was_written_again_is_another(tmp_path):
    folder = tmp_path / "rank-0-0"
    write(folder, EXPERTS).close()
    held, _ = make_host_cache(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write(folder, EXPERTS).close()
    rank = Rank(folder)
    assert rank.ask("found") == (False, len(KEYS))
    rank.process.kill()
    held.close()


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "rank-0-0", EXPERTS).close()
    return tmp_path / "rank-0-0"


def make_memfd(folder, *, seals=0, content=b"", owner=-1):
    """Make a file with the name and the size of a copy of the experts."""
    shared = SharedMemory(folder, Turn(folder))
    file = os.memfd_create(shared._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, whole_host_cache(EXPERTS))
    os.pwrite(file, content, 0)
    os.fchown(file, owner, -1)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return shared._name, file


@contextlib.contextmanager
def offered(folder, **how):
    """Offer a copy with other content, as another process of this user could."""
    name, file = make_memfd(folder, **how)
    offer = Offer(name, file)
    yield name
    offer.close()
    os.close(file)


def sealed_and_content(folder):
    host_cache, shared = make_host_cache(folder)
    try:
        return fcntl.fcntl(shared._file, fcntl.F_GET_SEALS), os.pread(shared._file, whole_host_cache(EXPERTS), 0)
    finally:
        host_cache.close()


def is_found(folder):
    host_cache, shared = make_host_cache(folder)
    host_cache.close()
    return shared.found


def test_a_copy_is_taken_from_the_private_folder_and_from_nowhere_else(folder):
    """Any process could make a file with the same name, seals and bytes."""
    seals, content = sealed_and_content(folder)
    _, file = make_memfd(folder, seals=seals, content=content)
    assert not is_found(folder)
    os.close(file)
    with offered(folder, seals=seals, content=content):
        assert is_found(folder)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK])
def test_a_copy_that_is_not_complete_is_not_taken(folder, seals):
    """If a file can be truncated, its readers may end with SIGBUS."""
    with offered(folder, seals=seals):
        assert not is_found(folder)


@as_root
def test_a_copy_of_another_user_is_not_taken(folder):
    seals, content = sealed_and_content(folder)
    with offered(folder, seals=seals, content=content, owner=12345):
        assert not is_found(folder)


def offer_and_ask(sockets, planted, file, pipe):
    """Offer a copy to one process; then ask every other socket for one.

    The second part waits for a message in ``pipe``, and sends there what was received.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{sockets}/{planted}")
        listening.listen()
        pipe.send("listens")
        asking, _ = listening.accept()
        with contextlib.suppress(OSError):
            socket.send_fds(asking, [b"."], [file])
        pipe.recv()
    received = []
    for path in sockets.iterdir():
        if path.name != planted:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(path))
                received += socket.recv_fds(asking, 1, 1)[1]
    pipe.send(received)


@as_root
def test_another_user_neither_offers_a_copy_nor_gets_one(folder):
    """This holds even if the folder's mode lets other users in."""
    seals, content = sealed_and_content(folder)
    name, file = make_memfd(folder, seals=seals, content=content)
    sockets = runtime_folder()
    for part in (sockets, *sockets.parents):  # including pytest's own folders
        if part.stat().st_mode & 0o077 == 0:
            part.chmod(0o777)
    pipe, theirs = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(12345)
            offer_and_ask(sockets, f"{name}.planted", file, theirs)
        except BaseException as error:
            theirs.send(repr(error))
        finally:
            os._exit(0)
    assert pipe.poll(60)
    assert pipe.recv() == "listens"
    sockets.chmod(0o700)
    host_cache, shared = make_host_cache(folder)
    assert not shared.found
    for part in (sockets, *sockets.iterdir()):
        part.chmod(0o777)
    pipe.send("ask")
    assert pipe.poll(60)
    assert pipe.recv() == []
    os.waitpid(child, 0)
    sockets.chmod(0o700)
    host_cache.close()
    os.close(file)


@pytest.mark.parametrize("how", ["mode", "link", "file"])
def test_a_folder_of_sockets_that_others_can_use_is_refused(folder, tmp_path, how):
    place = runtime_folder()
    if how == "mode":
        place.mkdir()
        place.chmod(0o777)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch()
    files = FileStore(folder)
    with pytest.raises(HostMemoryError):
        HostCache(files, whole_host_cache(EXPERTS), shared=SharedMemory(folder, Turn(folder)))
    files.close()


def test_a_long_path_to_the_folder_of_sockets_will_do(folder, tmp_path, monkeypatch):
    (tmp_path / ("long" * 50)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 50)))
    host_cache, _ = make_host_cache(folder)
    assert is_found(folder)
    host_cache.close()


def test_a_socket_whose_process_has_died_is_removed(folder):
    name, _ = make_memfd(folder)
    runtime_folder().mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{runtime_folder()}/{name}.dead")
    assert not is_found(folder)
    assert list(runtime_folder().iterdir()) == []


def test_a_copy_with_other_bytes_is_refused(folder):
    seals, _ = sealed_and_content(folder)
    with offered(folder, seals=seals, content=b"\x00" * 5000):
        with pytest.raises(StoreError) as caught:
            make_host_cache(folder)
        assert not isinstance(caught.value, DamagedStoreError), "the store itself is good"
    assert not is_found(folder)


def test_what_is_published_can_neither_be_cut_off_nor_written_to(folder):
    host_cache, shared = make_host_cache(folder)
    with pytest.raises(PermissionError):
        os.ftruncate(shared._file, 0)
    with pytest.raises(PermissionError):
        os.pwrite(shared._file, b"x", 0)
    host_cache.close()


def test_the_lock_beside_a_store_is_not_followed(folder, tmp_path):
    victim = tmp_path / "victim"
    folder.with_name(f"{folder.name}.lock").symlink_to(victim)
    with pytest.raises(StoreError):
        make_host_cache(folder)
    assert not victim.exists()


def test_a_turn_is_locked_for_writing_as_nfs_needs_it(folder, monkeypatch):
    """NFS 4 emulates flock by other locks, which need a descriptor for writing."""
    real, turn = fcntl.flock, Turn(folder)

    def lock(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    turn.begin()
    with open(folder.with_name(f"{folder.name}.lock")) as other, pytest.raises(BlockingIOError):
        real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    turn.end()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_lock_file_that_may_only_be_read_is_locked_too(folder, monkeypatch, code):
    real, lock = os.open, folder.with_name(f"{folder.name}.lock")
    lock.touch()

    def read_only(path, flags, *mode, **more):
        if path == lock and flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    turn = Turn(folder)
    turn.begin()
    with lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    turn.end()
