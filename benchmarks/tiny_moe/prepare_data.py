"""Collect, clean, split and tokenize the training data of the small shipped model.

    python benchmarks/tiny_moe/prepare_data.py download --work build/tiny_moe
    python benchmarks/tiny_moe/prepare_data.py build --work build/tiny_moe

`download` takes manuals from the Debian archive (unpacked, never installed) and libraries from PyPI; the standard
library is the running interpreter's. `build` extracts plain text, removes what occurs twice, splits by document, trains
the tokenizer, and writes the token streams into the work folder and tokenizer, held-out extracts and licences into the
package.
"""

# ruff: noqa: SIM905  (lists of words read best as words)
import argparse
import hashlib
import html.parser
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from word_problems import word_problems

MODEL = Path(__file__).resolve().parent / "model"
VOCABULARY = 3072
END, PAD = "<|endoftext|>", "<|pad|>"
HELDOUT_SHARE = 0.02  # of the documents of docs and code
HELDOUT_BYTES = 50_000  # of the extract shipped per domain
PROBLEMS = 60_000
PROBLEMS_HELDOUT = 1_000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)


@dataclass
class Source:
    """One licensed origin of documents; `shipped` ones also give the held-out extract of the package."""

    name: str
    domain: str
    licence: str
    origin: str  # "debian" | "pypi" | "interpreter"
    copyright: str
    shipped: bool = False
    include: str = ".*"  # of the path of a file inside the package
    exclude: str = r"$^"
    version: str = ""
    documents: int = 0
    bytes: int = 0
    licence_text: str = field(default="", repr=False)


PYPI_VERSIONS = {
    "sympy": "1.14.0",
    "networkx": "3.6.1",
    "django": "5.2.19",
    "scikit-learn": "1.9.1",
    "pandas": "3.1.1",
    "sqlalchemy": "2.1.9",
    "mpmath": "1.4.1",
    "flask": "3.1.3",
    "click": "8.5.1",
    "requests": "2.34.2",
    "attrs": "26.1.0",
    "black": "26.10.1",
    "rich": "15.0.0",
    "pygments": "2.21.0",
}
MDBOOKS = "book|reference|nomicon|rust-by-example|edition-guide|embedded-book|rustc|rustdoc|unstable-book"
SOURCES = [
    Source("postgresql-doc-15", "docs", "PostgreSQL", "debian",
           "The PostgreSQL Global Development Group; The Regents of the University of California", True,
           r"/html/.*\.html$", r"bookindex|/index\.html$|release-"),
    Source("python3.11-doc", "docs", "PSF-2.0", "debian", "Python Software Foundation", True, r"\.html$",
           r"genindex|py-modindex|/contents\.html|/search\.html|whatsnew/changelog|/license\.html|copyright\.html"),
    Source("sqlite3-doc", "docs", "Public domain", "debian", "none: dedicated to the public domain", True,
           r"\.html$", r"releaselog|keyword_index|/toc\.html|changelog"),
    Source("rust-doc", "docs", "MIT OR Apache-2.0", "debian", "The Rust Project Developers", False,
           rf"/html/({MDBOOKS})/.*\.html$", r"print\.html|/toc\.html|SUMMARY"),
    Source("apache2-doc", "docs", "Apache-2.0", "debian", "The Apache Software Foundation", False,
           r"/manual/en/.*\.html$", r"quickreference|/license\.html"),
    Source("python-django-doc", "docs", "BSD-3-Clause", "debian", "Django Software Foundation and contributors",
           False, r"/html/.*\.html$", r"_modules|genindex|py-modindex|/search\.html"),
    Source("nodejs-doc", "docs", "MIT", "debian", "Node.js contributors", False, r"/api/.*\.html$", r"/all\.html"),
    Source("cpython", "code", "PSF-2.0", "interpreter", "Python Software Foundation", True, r"\.py$",
           r"site-packages|/test/|/tests/|idle_test|/lib2to3/tests|turtledemo|pydoc_data"
           r"|encodings/(cp|iso|mac|koi)|__phello__"),
    Source("sympy", "code", "BSD-3-Clause", "pypi", "SymPy Development Team", True, r"\.py$",
           r"/tests/|/benchmarks/|parser/(latex|autolev)/_|/_antlr/|rubi|hyper_generated"),
    Source("networkx", "code", "BSD-3-Clause", "pypi", "NetworkX Developers", True, r"\.py$", r"/tests/|/atlas"),
    Source("django", "code", "BSD-3-Clause", "pypi", "Django Software Foundation and contributors", False, r"\.py$",
           r"/locale/|/migrations/"),
    Source("scikit-learn", "code", "BSD-3-Clause", "pypi", "The scikit-learn developers", False, r"\.py$",
           r"/tests/|/_build"),
    Source("pandas", "code", "BSD-3-Clause", "pypi",
           "AQR Capital Management, Lambda Foundry, PyData Development Team and contributors", False, r"\.py$",
           r"/tests/"),
    Source("sqlalchemy", "code", "MIT", "pypi", "SQLAlchemy authors and contributors", False, r"\.py$", r"/testing/"),
    Source("mpmath", "code", "BSD-3-Clause", "pypi", "Fredrik Johansson and mpmath contributors", False, r"\.py$",
           r"/tests/"),
    Source("flask", "code", "BSD-3-Clause", "pypi", "Pallets", False, r"\.py$"),
    Source("click", "code", "BSD-3-Clause", "pypi", "Pallets", False, r"\.py$"),
    Source("requests", "code", "Apache-2.0", "pypi", "Kenneth Reitz and contributors", False, r"\.py$"),
    Source("attrs", "code", "MIT", "pypi", "Hynek Schlawack and the attrs contributors", False, r"\.py$"),
    Source("black", "code", "MIT", "pypi", "Lukasz Langa and contributors", False, r"\.py$", r"blib2to3"),
    Source("rich", "code", "MIT", "pypi", "Will McGugan", False, r"\.py$", r"_emoji_codes|_unicode|_cell_widths"),
    Source("pygments", "code", "BSD-2-Clause", "pypi", "The Pygments team", False, r"\.py$",
           r"_builtins|_mapping|unistring"),
]  # fmt: skip


class PlainText(html.parser.HTMLParser):
    """Paragraphs of an HTML page as plain text: headings, prose, list items, tables and examples, no navigation."""

    BLOCKS = frozenset("p li h1 h2 h3 h4 h5 h6 pre dt dd tr div table ul ol dl blockquote section article main".split())
    HIDDEN = frozenset("script style nav head button form select noscript svg footer".split())
    HIDDEN_CLASSES = re.compile(
        r"navheader|navfooter|\btoc\b|sphinxsidebar|\brelated\b|menu|footer|headerlink|linenos|apidocs|fancy_toc"
        r"|doc-nav|page-header|langs|nosearch|fancy-position|mobile-nav|sidebar|nav-|index|preamble|quickview|api_metadata"
    )
    HIDDEN_BY_CLASS = frozenset("div span a details ul table".split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.text: list[str] = []
        self.hidden: list[str] = []  # the open tags of the hidden element's own name
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Start a block, or an element to leave out."""
        if self.hidden:
            if tag == self.hidden[0]:
                self.hidden.append(tag)
            return
        classes = dict(attrs).get("class") or ""
        if tag in self.HIDDEN or (tag in self.HIDDEN_BY_CLASS and self.HIDDEN_CLASSES.search(classes)):
            self.hidden.append(tag)
            return
        if tag in self.BLOCKS:
            self.flush()
        if tag == "pre":
            self.preformatted += 1
        if tag == "br":
            self.text.append("\n" if self.preformatted else " ")
        if tag in ("td", "th"):
            self.text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        """End a block, or an element that was left out."""
        if self.hidden:
            if tag == self.hidden[0]:
                self.hidden.pop()
            return
        if tag in self.BLOCKS:
            self.flush()
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)

    def handle_data(self, data: str) -> None:
        """Keep the text of the open block."""
        if not self.hidden:
            self.text.append(data)

    def flush(self) -> None:
        """End a paragraph."""
        text = "".join(self.text)
        self.text = []
        text = text.strip("\n").rstrip() if self.preformatted else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(text)


ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "...",
     "\u00a0": " ", "\u2192": "->", "\u00b6": "", "\u2212": "-", "\u2022": "*", "\u00d7": "x", "\u2010": "-",
     "\u2011": "-", "\u200b": ""}
)  # fmt: skip


def plain_paragraphs(page: str) -> list[str]:
    """Text paragraphs of one HTML page, in ASCII punctuation; those mostly of other scripts are left out."""
    parser = PlainText()
    parser.feed(page)
    parser.flush()
    paragraphs = (paragraph.translate(ASCII) for paragraph in parser.paragraphs)
    return [p for p in paragraphs if p and sum(not c.isascii() for c in p) <= 0.05 * len(p)]


def clean_code(text: str) -> str:
    """Source text without trailing blanks, carriage returns and comment blocks that only state a licence."""
    text = text.expandtabs(4).replace("\r\n", "\n")
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and lines[0].startswith("#"):  # shebang, coding line, licence header
        lines.pop(0)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip() + "\n"


def download(work: Path) -> None:
    """Fetch every package into `work`/debian and `work`/pypi and unpack the Debian ones."""
    (work / "debian").mkdir(parents=True, exist_ok=True)
    (work / "pypi").mkdir(exist_ok=True)
    for source in SOURCES:
        if source.origin == "debian":
            subprocess.run(["apt-get", "download", source.name], cwd=work / "debian", check=True)
            (archive,) = (work / "debian").glob(f"{source.name}_*.deb")
            subprocess.run(["dpkg", "-x", archive, work / "debian" / source.name], check=True)
        elif source.origin == "pypi":
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--dest", work / "pypi", f"{source.name}=={PYPI_VERSIONS[source.name]}"], check=True)


def read_source(source: Source, work: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, raw text) of one source's files in a fixed order; fills in its version and licence text."""
    chosen, refused = re.compile(source.include), re.compile(source.exclude)
    if source.origin == "pypi":
        stem = source.name.replace("-", "_")
        (wheel,) = (work / "pypi").glob(f"{stem}-*.whl")
        source.version = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if ".dist-info/" in name and re.search(r"LICEN[CS]E", name) and not source.licence_text:
                    source.licence_text = archive.read(name).decode("utf-8", "ignore")
                if chosen.search("/" + name) and not refused.search("/" + name) and ".dist-info/" not in name:
                    yield name, archive.read(name).decode("utf-8", "ignore")
        return
    if source.origin == "debian":
        root = work / "debian" / source.name
        (archive,) = (work / "debian").glob(f"{source.name}_*.deb")
        source.version = archive.name.split("_")[1].replace("%3a", ":")
        notice = root / "usr/share/doc" / source.name / "copyright"
        source.licence_text = notice.read_text(errors="ignore") if notice.exists() else ""
    else:
        root = Path(sysconfig.get_path("stdlib"))
        source.version = sys.version.split()[0]
        source.licence_text = (root / "LICENSE.txt").read_text() if (root / "LICENSE.txt").exists() else ""
    for path in sorted(root.rglob("*")):
        name = "/" + path.relative_to(root).as_posix()
        if chosen.search(name) and not refused.search(name) and path.is_file() and not path.is_symlink():
            yield name, path.read_text(encoding="utf-8", errors="ignore")


def fraction(name: str) -> float:
    """A document's place in [0, 1), from its name alone, so that the split never depends on order or size."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def is_heldout(source: Source, name: str) -> bool:
    """Whether a document is held out; one chapter's pages may share text, which `collect` then removes."""
    return fraction(f"{source.name}:{name}") < HELDOUT_SHARE


def collect(domain: str, work: Path) -> tuple[list[str], list[tuple[Source, str, str]]]:
    """Documents of one domain: the training texts, and (source, name, text) of the held-out ones.

    Paragraphs of manuals that occurred before, in any document, are dropped; training documents come first, so that
    a held-out one keeps only what training has never shown. Held-out code of which more than a tenth of the long lines
    occurs in training is dropped altogether.
    """
    documents = []
    for source in SOURCES:
        if source.domain == domain:
            for name, text in read_source(source, work):
                documents.append((is_heldout(source, name), source, name, text))
    documents.sort(key=lambda entry: entry[0])
    training, heldout, seen = [], [], set()
    for is_test, source, name, text in documents:
        if domain == "docs":
            fresh = []
            for paragraph in plain_paragraphs(text):
                key = hash(" ".join(paragraph.split()))
                if len(paragraph) < 40 or key not in seen:
                    fresh.append(paragraph)
                    seen.add(key)
            text = "\n\n".join(fresh)
            if sum(len(paragraph) for paragraph in fresh if len(paragraph) >= 40) < max(400, len(text) // 2):
                continue
        else:
            text = clean_code(text)
            lines = {hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= 30}
            repeated = len(lines & seen) / max(1, len(lines))
            if len(text) < 400 or repeated > (0.1 if is_test else 0.7):
                continue
            if not is_test:
                seen |= lines
        if is_test:
            heldout.append((source, name, text))
        else:
            training.append(text)
            source.documents += 1
            source.bytes += len(text.encode())
    return training, heldout


def shipped_extract(heldout: list[tuple[Source, str, str]], limit: int) -> list[tuple[str, str, str]]:
    """(source, name, text) of held-out documents of the shipped sources, taken in turn, about `limit` bytes in all."""
    chosen, total = [], 0
    candidates = [entry for entry in heldout if entry[0].shipped and len(entry[2]) <= limit // 4]
    ordered = sorted((fraction(f"extract:{s.name}:{name}"), s.name, name, text) for s, name, text in candidates)
    for _, source, name, text in ordered:
        if total + len(text.encode()) <= limit:
            chosen.append((source, name, text))
            total += len(text.encode())
    return chosen


def train_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    """Byte-level BPE with single digits, saved as transformers and vLLM load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> numpy.ndarray:
    """One stream of token ids, every document followed by the end token.  [tokens] uint16"""
    end = tokenizer.token_to_id(END)
    parts = []
    for first in range(0, len(texts), 256):  # an encoding holds far more than its ids: never all of them at once
        for encoding in tokenizer.encode_batch_fast(texts[first : first + 256]):
            parts.append(numpy.array([*encoding.ids, end], dtype=numpy.uint16))
    return numpy.concatenate(parts)


def write_licences(path: Path, shipped: dict[str, list[tuple[str, str, str]]]) -> None:
    """Attribution of every training source, and the licence texts of those whose text is shipped as an extract."""
    lines = [
        "# Origin and licences of the small model's data",
        "",
        "`model.safetensors` and the tokenizer were trained on the sources below; `heldout/` holds extracts of those",
        "marked so, which were not trained on. The arithmetic problems are generated by",
        "`benchmarks/tiny_moe/word_problems.py` and are under this project's own licence, as are the model and the",
        "tokenizer.",
        "",
        "| source | version | origin | licence | copyright | extract shipped |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for s in SOURCES:
        shown = "yes" if any(s.name == name for files in shipped.values() for name, _, _ in files) else ""
        lines.append(f"| {s.name} | {s.version} | {s.origin} | {s.licence} | {s.copyright} | {shown} |")
    lines += ["", "## Documents in the extracts", ""]
    for domain, files in shipped.items():
        lines += [f"- {domain}: " + ", ".join(f"{source}:{name}" for source, name, _ in files)]
    lines += ["", "## Licence texts of the extracts", ""]
    for s in SOURCES:
        if s.shipped and s.licence_text:
            lines += [f"### {s.name}", "", "```text", s.licence_text.strip(), "```", ""]
    path.write_text("\n".join(lines))


def build(work: Path, package: Path) -> None:
    """Turn the downloads into token streams (`work`/tokens) and the package's tokenizer, extracts and licences."""
    training, heldout, shipped = {}, {}, {}
    for domain in ("docs", "code"):
        training[domain], entries = collect(domain, work)
        heldout[domain] = [text for _, _, text in entries]
        shipped[domain] = shipped_extract(entries, HELDOUT_BYTES)
    problems = word_problems(PROBLEMS + PROBLEMS_HELDOUT, seed=1)
    training["arithmetic"], heldout["arithmetic"] = problems[:PROBLEMS], problems[PROBLEMS:]

    print({domain: len(texts) for domain, texts in training.items()}, flush=True)
    every = {"docs": 3, "code": 3, "arithmetic": 60}
    sample = [text for domain, stride in every.items() for text in training[domain][::stride]]
    tokenizer = train_tokenizer(sample, package)

    tokens = work / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for domain in training:
        for split, texts in (("train", training[domain]), ("heldout", heldout[domain])):
            stream = encode(tokenizer, texts)
            numpy.save(tokens / f"{domain}.{split}.npy", stream)
            size = sum(len(text.encode()) for text in texts)
            sizes[f"{domain}.{split}"] = {"documents": len(texts), "bytes": size, "tokens": len(stream)}
            print(domain, split, sizes[f"{domain}.{split}"], flush=True)

    extracts = package / "heldout"
    extracts.mkdir(exist_ok=True)
    for domain, files in shipped.items():
        (extracts / f"{domain}.txt").write_text(f"\n{END}\n".join(text.strip("\n") for _, _, text in files) + "\n")
    few, size = [], 0
    for problem in heldout["arithmetic"]:
        size += len(problem) + len(END) + 2
        if size > HELDOUT_BYTES:
            break
        few.append(problem)
    (extracts / "arithmetic.txt").write_text(f"\n{END}\n".join(few) + "\n")
    write_licences(package / "LICENSES.md", shipped)
    sources = [{key: value for key, value in asdict(s).items() if key != "licence_text"} for s in SOURCES]
    (work / "data.json").write_text(json.dumps({"sources": sources, "sizes": sizes}, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["download", "build"])
    parser.add_argument("--work", type=Path, default=Path("build/tiny_moe"), help="downloads and token streams")
    parser.add_argument("--package", type=Path, default=MODEL, help="folder of the shipped model")
    arguments = parser.parse_args()
    if arguments.command == "download":
        download(arguments.work)
    else:
        build(arguments.work, arguments.package)


if __name__ == "__main__":
    main()
