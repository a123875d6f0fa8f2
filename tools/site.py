"""`make site`: copies the pages to build/pages, for mkdocs.

They are laid out as in the repository. The README is the first page and links to pages outside docs/; with all of them
in one tree the links work as they do in the repository.
"""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
PATTERNS = ("*.md", "LICENSE", "docs/*", "benchmarks/*.json", "benchmarks/*.png")


def files() -> list[str]:
    """Return the pages, and the files that they link to, as git knows them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PATTERNS]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in listed if (ROOT / name).is_file()]


def main() -> None:
    """Copy them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in files():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, PAGES / name)


if __name__ == "__main__":
    main()
