"""Cut a wheel into pieces for a slow or limited connection, and join them again.

    python benchmarks/gpu/wheel_parts.py split vllm-0.26.0-cp38-abi3-manylinux1_x86_64.whl PIECES --mib 60
    python benchmarks/gpu/wheel_parts.py join PIECES FOLDER

``join`` checks every piece's SHA-256, says which are missing, and leaves the wheel in FOLDER. Then
``python -m pip install --no-index --no-deps --target DIR FOLDER/*.whl`` needs no network.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

INDEX = "pieces.json"  # the wheel's name, and the digests of its pieces in order


def split(wheel: Path, folder: Path, mib: int) -> int:
    """Write the pieces and their index into a folder; return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    digests = []
    with wheel.open("rb") as file:
        while piece := file.read(mib << 20):
            (folder / f"{len(digests):03}.piece").write_bytes(piece)
            digests.append(hashlib.sha256(piece).hexdigest())
    (folder / INDEX).write_text(json.dumps({"wheel": wheel.name, "pieces": digests}, indent=1))
    return len(digests)


def join(folder: Path, into: Path) -> Path:
    """Write the wheel and return its path.

    Raises:
        ValueError: pieces are missing or have other bytes; the message names them.
    """
    index = json.loads((folder / INDEX).read_text())
    paths = [folder / f"{number:03}.piece" for number in range(len(index["pieces"]))]
    wrong = [
        path.name
        for path, digest in zip(paths, index["pieces"], strict=True)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest
    ]
    if wrong:
        raise ValueError(f"{folder} lacks {', '.join(wrong)}, or they have other bytes; copy them again")
    into.mkdir(parents=True, exist_ok=True)
    with (into / index["wheel"]).open("wb") as file:
        for path in paths:
            file.write(path.read_bytes())
    return into / index["wheel"]


def main(argv: list[str] | None = None) -> int:
    """Run the command that was given: split or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one, other = commands.add_parser("split"), commands.add_parser("join")
    one.add_argument("wheel", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--mib", type=int, default=60)
    other.add_argument("folder", type=Path)
    other.add_argument("into", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "split":
            print(f"{split(arguments.wheel, arguments.folder, arguments.mib)} pieces are in {arguments.folder}")
        else:
            print(join(arguments.folder, arguments.into))
    except (OSError, ValueError) as error:
        print(f"wheel_parts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
