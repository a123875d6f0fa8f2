"""What decode on tensor cores should gain, by instructions alone.

The gain is on the measured card; no GPU is needed. Measured times without tensor cores are scaled by the instructions
of both kernels' loops over a warp's strip. That is right if instruction issue bounds the kernel that was measured, as
its share of memory's bound says, and nothing else bounds the other one before memory does. The estimate is no
measurement; `gpu.py --parts decode` is one.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed package stays the one that is used

from layers import LAYERS, route

HERE = Path(__file__).parent
MEASURED = HERE / "gpu-NVIDIA-H200-2026-11-26.json"
ALONE, TWO = 502, 729
"""Instructions without tensor cores, for one token and for two at a time; experts are read again for every two."""
TOKENS = 1, 16


def on_tensor_cores(tokens: int, triton: str = "3.6.0", architecture: int = 90) -> int:
    """Return the instructions for up to so many tokens of an expert.

    Of gate and up and of down, the larger number counts.
    """
    note = f"device, {8 if tokens <= 8 else 16} tokens"
    rows = json.loads((HERE / "compiled.json").read_text())
    return max(
        row["instructions"]
        for row in rows
        if row["kernel"].startswith("mma") and row["precisions"] == "4" and row["note"] == note
        and (row["triton"], row["architecture"]) == (triton, architecture)
    )  # fmt: skip


def main() -> None:
    """Print a table in Markdown."""
    speeds = {speed["name"]: speed for speed in json.loads(MEASURED.read_text())["parts"]["speeds"]["speeds"]}
    print("| 4 bits | bound | measured without | of the bound | by count | of the bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tokens in TOKENS:
        for layer in LAYERS[:2]:
            counts: dict[int, int] = {}
            for expert in (expert for row in route(layer, tokens) for expert in row):
                counts[expert] = counts.get(expert, 0) + 1
            before = sum(count // 2 * TWO + count % 2 * ALONE for count in counts.values())
            after = sum(on_tensor_cores(count) for count in counts.values())
            speed = speeds[f"kernels, {layer.name}, 4 bits, {tokens} tokens"]
            bound, measured = speed["bound"], speed["measured"]
            expected = max(measured * after / before, bound)
            print(
                f"| {layer.name}, {tokens} token{'s' * (tokens > 1)} | {bound:.3g} us | {measured:.3g} us | "
                f"{bound / measured:.0%} | {expected:.3g} us | {bound / expected:.0%} |"
            )


if __name__ == "__main__":
    main()
