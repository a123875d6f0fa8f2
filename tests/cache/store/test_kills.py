"""Kill a first quantization at random points; no bad store may remain.

The next start cleans up. Run by hand with ``STORE_KILLS=10000`` and ``--timeout 0``. ``STORE_KILLS_NAMESPACE=1`` gives
every writer its own PID namespace, where each is process 1 and none sees the others, as in containers (needs
``unshare`` and the right to use it).
"""

import os
import subprocess
import sys

KILLS = int(os.environ.get("STORE_KILLS", "40"))
NAMESPACE = bool(os.environ.get("STORE_KILLS_NAMESPACE"))

PROGRAM = '''
import contextlib, os, random, signal, sys, time
from pathlib import Path

import torch
from tests.small_model import make_experts
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.cache.store import FileStore, Manifest
from vllm_dymoe.durable import all_leftovers, clean
from vllm_dymoe.cache.store.writer import StoreWriter

root, kills, namespace = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
experts = make_experts(layers=3, num_experts=2, bits=(4,))
torch.set_num_threads(1)


def write(folder):
    clean(all_leftovers(root))
    random_store(experts, StoreWriter(folder, Manifest(experts, "rtn", "a model")), seed=1).close()


def begin(folder):
    """Start a writer; return the process to wait for and the one to kill, which writes."""
    come, go = os.pipe()
    child = os.fork()
    if child == 0:
        if namespace:
            libc.unshare(CLONE_NEWPID)
            inner = os.fork()
            if inner:
                os.write(go, inner.to_bytes(4, "little"))
                code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
                if code < 0:
                    os.kill(os.getpid(), -code)
                os._exit(code)
            assert os.getpid() == 1
        try:
            write(folder)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(go)
    writer = int.from_bytes(os.read(come, 4), "little") if namespace else child
    os.close(come)
    return child, writer


if namespace:
    import ctypes
    libc, CLONE_NEWPID = ctypes.CDLL(None, use_errno=True), 0x20000000
    child = os.fork()
    if child == 0:
        os._exit(libc.unshare(CLONE_NEWPID) != 0)
    if os.waitpid(child, 0)[1]:
        print("skipped: no namespaces")
        sys.exit()

seconds = 1.0
for number in range(5):
    child, _ = begin(root / "model" / f"warm-{number}")
    begun = time.perf_counter()
    os.waitpid(child, 0)
    seconds = min(seconds, time.perf_counter() - begun)
chance, published, killed, longest = random.Random(0), 0, 0, 1.2 * seconds
for number in range(kills):
    folder = root / "model" / f"rank-{number % 3}-0"
    writers = [begin(folder) for _ in range(1 + number % 2)]  # alone, and two at a time
    time.sleep(chance.random() * longest * len(writers))
    for _, writer in writers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in writers]
    assert set(codes) <= {0, -signal.SIGKILL}, codes
    killed += codes.count(-signal.SIGKILL)
    # On a busy machine this process sleeps longer than it asks for, and would find its writers finished.
    longest = min(1.2 * seconds, longest * (1.25 if -signal.SIGKILL in codes else 0.8))
    if folder.exists():  # complete, whenever it has its name
        store = FileStore(folder)
        for layer, expert in ((0, 0), (1, 1), (2, 1)):
            store.read_into(SliceKey(layer, expert, 4), torch.empty(experts.formats[4].nbytes, dtype=torch.uint8))
        store.close()
        published += 1
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
clean(all_leftovers(root))
left = [path.name for path in (root / "model").iterdir() if not path.name.startswith("warm-")]
assert not left, left
assert killed > kills // 4, (killed, kills)
print(f"kills {killed} published {published} of {kills}, a store takes {seconds * 1e3:.1f} ms")
'''


def test_kills_leave_neither_bad_stores_nor_folders(tmp_path):
    command = [sys.executable, "-c", PROGRAM, tmp_path, str(KILLS), str(int(NAMESPACE))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.getcwd())
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
