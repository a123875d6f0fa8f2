"""Unreadable pages of mapped files fail only their step.

This holds whoever else handles SIGBUS. Each case runs in a process of its own, forked from one that has imported torch
(2.5 s of a core) and has called nothing.
"""

import json
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dymoe.kernels import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="mappings are guarded by the native library")

ROOT = Path(__file__).resolve().parents[3]
SERVED = """
import faulthandler, mmap, os, signal, sys
from pathlib import Path
faulthandler.disable()
from tests.executor.steps import STEPS, run, with_budget
from tests.small_model import make_experts
from tests.cache.store.stores import write
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.cache.transfer import TransferError

write(Path(sys.argv[1]), make_experts(layers=2))
files = FileStore(Path(sys.argv[1]))
server = with_budget(files, "minimum", low=0, misses="compute")
run(server, STEPS)

def cut():
    for layer in range(2):
        os.truncate(files._layers[layer].path, 4096)
    try:
        run(server, STEPS)
    except TransferError as error:
        assert "truncated" in str(error), error
        print("failed alone")

def foreign_fault():
    with open(sys.argv[1] + "-foreign", "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        other = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
        return other[0]
"""
FORKS = """
import json, os, sys, traceback
from tests.executor.steps import STEPS, run, with_budget
from tests.small_model import make_experts
from tests.cache.store.stores import write

for line in sys.stdin:
    program, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for stream, name in ((1, "output"), (2, "errors")):
                os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
            os.environ["HOME"], sys.argv = folder, ["-c", f"{folder}/store"]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
FIRST = "seen = []\nsignal.signal(signal.SIGBUS, lambda *_: seen.append(1))\n" + SERVED


NAMES = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def forks():
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, cwd=ROOT, env=NAMES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        yield it
        it.stdin.close()


@pytest.fixture
def ended(forks, tmp_path):
    """Run a process to its end; return its exit status, output and errors."""

    def run(program):
        print(json.dumps([program, str(tmp_path)]), file=forks.stdin, flush=True)
        status = int(forks.stdout.readline())
        return status, *((tmp_path / name).read_text() for name in ("output", "errors"))

    return run


@pytest.mark.parametrize(
    "between",
    [
        "",
        "faulthandler.enable()",
        "signal.signal(signal.SIGBUS, signal.default_int_handler)",
        "signal.signal(signal.SIGBUS, lambda *_: None); os.kill(os.getpid(), signal.SIGBUS)",
        "signal.signal(signal.SIGBUS, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGBUS)",
        "faulthandler.enable(); run(server, STEPS); faulthandler.disable()",
    ],
)
def test_the_guard_stays_whatever_handles_the_signal_later(between, ended):
    status, said, errors = ended(f"{SERVED}\n{between}\ncut()")
    assert (status, said) == (0, "failed alone\n"), errors[-2000:]


def test_a_signal_that_was_sent_goes_to_whoever_waited_for_it_before(ended):
    program = FIRST.replace("seen = []", "import signal\nseen = []")
    sends = "os.kill(os.getpid(), signal.SIGBUS); os.kill(os.getpid(), signal.SIGBUS)\nassert len(seen) == 2, seen"
    status, said, errors = ended(f"{program}\n{sends}\ncut()")
    assert (status, said) == (0, "failed alone\n"), errors[-2000:]


@pytest.mark.parametrize("last", ["os.kill(os.getpid(), signal.SIGBUS)", "foreign_fault()"])
@pytest.mark.parametrize("between", ["", "faulthandler.enable()", "faulthandler.enable(); run(server, STEPS)"])
def test_what_is_not_ours_ends_the_process_as_ever(between, last, ended):
    status, said, errors = ended(f"{SERVED}\n{between}\nprint('before', flush=True)\n{last}\nprint('behind')")
    assert (status, said) == (-signal.SIGBUS, "before\n"), errors[-2000:]
    assert errors.count("Fatal Python error: Bus error") == bool(between)


SHIM = r"""
// A policy of pages of 64 KiB, on one of 4: what is not aligned to them is refused, as there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { PAGE = 65536 };
static void* map(void* at, size_t n, int p, int f, int d, off_t o) {
    return (void*)syscall(SYS_mmap, at, n, p, f, d, o);
}
long sysconf(int name) {
    long (*real)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? PAGE : real(name);
}
void* mmap(void* at, size_t n, int p, int f, int d, off_t o) {
    if (f & MAP_FIXED) {
        if ((size_t)at % PAGE) { errno = EINVAL; return MAP_FAILED; }
        return map(at, (n + PAGE - 1) / PAGE * PAGE, p, f, d, o);
    }
    if (d < 0 || at) return map(at, n, p, f, d, o);
    char* room = map(0, n + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* first = room + (PAGE - (size_t)room % PAGE) % PAGE;
    return map(first, n, p, f | MAP_FIXED, d, o);
}
void* mmap64(void* at, size_t n, int p, int f, int d, off_t o) { return mmap(at, n, p, f, d, o); }
int mincore(void* at, size_t n, unsigned char* pages) {
    unsigned char small[16];
    if ((size_t)at % PAGE) { errno = EINVAL; return -1; }
    for (size_t page = 0; page < (n + PAGE - 1) / PAGE; page++) {
        size_t left = n - page * PAGE;
        if (syscall(SYS_mincore, (char*)at + page * PAGE, left < PAGE ? left : PAGE, small)) return -1;
        pages[page] = small[0];
    }
    return 0;
}
"""
LARGE = """
import os, sys
from pathlib import Path
from vllm_dymoe.cache.store.mapped import MappedFile, lost_pages

path = Path(sys.argv[1])
path.write_bytes(b"\\1" * (5 * 65536))
file = os.open(path, os.O_RDONLY)
mapped = MappedFile(file)
assert mapped.has(0, 5 * 65536) and mapped.has(70_001, 100)
assert int(mapped.bytes.sum()) == 5 * 65536
os.truncate(path, 65536)
assert int(mapped.bytes.sum()) == 65536
print(lost_pages())
"""


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="emulates larger pages on a policy of small ones")
def test_pages_have_the_size_that_the_policy_says(tmp_path):
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no C compiler: {built.stderr[-200:]}")
    for environment, lost in (({}, 64), ({"LD_PRELOAD": str(shim)}, 4)):
        command, names = [sys.executable, "-c", LARGE, str(tmp_path / "store")], NAMES | {"HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=names | environment, capture_output=True, text=True, timeout=400)
        assert (done.returncode, done.stdout) == (0, f"{lost}\n"), done.stderr[-2000:]


OTHERS = """
import os
from vllm_dymoe.cache.store.mapped import MappedFile, in_page_cache
from vllm_dymoe.kernels import native

native.load()
if os.geteuid() == 0:
    os.setuid(65534)
file = os.open("/bin/sh", os.O_RDONLY)
try:
    MappedFile(file)
except OSError as error:
    print(error, in_page_cache(file, 0, 4096))
"""


def test_a_file_whose_pages_the_system_does_not_tell_is_not_mapped(ended):
    """Of root's file, Linux tells other users that every page is in memory."""
    status, said, errors = ended(OTHERS)
    assert status == 0, errors[-2000:]
    assert "which of its pages are in memory False" in said
