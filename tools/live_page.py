"""`make live-page`: takes docs/images/live.png, a picture of the live page.

The shipped model is served at 4 and 2 bits with 40 % of its experts in slots, on a CPU that emulates a card behind a
slow link. It gets the shipped prompts, three at a time, while headless Chromium keeps the page open.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from vllm_dymoe.bench.prompts import SHIPPED, by_turns, read_prompts

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.support.ports import free_port  # noqa: E402

MODEL, PICTURE = ROOT / "benchmarks" / "tiny_moe" / "model", ROOT / "docs" / "images" / "live.png"
OPTIONS = {"expert_budget": "40%", "policy": "dymoe", "link_gbps": 0.2}
SECONDS = 75  # that the page is open
AT_ONCE, TOKENS = 3, 96  # requests, and tokens of each answer


def find_chromium() -> str:
    """Return the browser; SystemExit if there is none on PATH."""
    for name in ("chromium", "google-chrome", "chromium-browser"):
        if found := shutil.which(name):
            return found
    raise SystemExit(
        "make live-page: there is no Chromium on PATH; install it, for instance with apt install chromium."
    )


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait for the server; SystemExit with the end of its log if it ends."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"make live-page: the server ended; the end of {log}:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)


def send(url: str, texts: Sequence[str], stop: threading.Event) -> None:
    """Send one request after the other until told to stop."""
    number = 0
    while not stop.is_set():
        request = {"model": "tiny", "prompt": texts[number % len(texts)], "max_tokens": TOKENS, "temperature": 0.8}
        httpx.post(f"{url}/v1/completions", json=request, timeout=120).raise_for_status()
        number += 1


def take_picture(url: str, chromium: str) -> None:
    """Keep the page open for a while, then write the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(f"{url}/dymoe/live")
        page.wait_for_timeout(1000 * SECONDS)
        page.locator("#map").focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()


def main() -> None:
    """Pack and serve the model, send requests, and take the picture."""
    chromium, tools = find_chromium(), Path(sys.executable).parent
    texts = [prompt.text for prompt in by_turns(read_prompts(SHIPPED).prompts)]
    with tempfile.TemporaryDirectory(prefix="dymoe-live-") as name:
        folder, log = Path(name) / "model", Path(name) / "log"
        bits = ["--high", "4", "--low", "2"]
        subprocess.run([tools / "vllm-dymoe", "quantize", MODEL, "-o", folder, *bits], check=True, capture_output=True)
        port, stop = free_port(), threading.Event()
        url = f"http://127.0.0.1:{port}"
        command = [tools / "vllm", "serve", folder, "--port", str(port), "--served-model-name", "tiny"]
        command += ["--max-model-len", "1024", "--enforce-eager", "--gpu-memory-utilization", "0.2"]
        command += ["--additional-config", json.dumps({"dymoe": OPTIONS})]
        alone = {
            "VLLM_PLUGINS": "dymoe",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | alone)
        try:
            wait_until_ready(server, url, log)
            senders = [
                threading.Thread(target=send, args=(url, texts[part::AT_ONCE], stop), daemon=True)
                for part in range(AT_ONCE)
            ]
            for sender in senders:
                sender.start()
            take_picture(url, chromium)
            stop.set()
            for sender in senders:
                sender.join()
        finally:
            server.terminate()
            server.wait(60)
    print(f"make live-page: wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
