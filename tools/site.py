"""`make site`: copies the pages to build/pages, for mkdocs.

They are laid out as in the repository, with the README as the first page. It links to pages outside docs/; with all
pages in one tree, links work as they do in the repository.
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
    """Copy the pages and files."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in files():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, PAGES / name)


if __name__ == "__main__":
    main()
