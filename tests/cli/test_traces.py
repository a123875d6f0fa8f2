"""``vllm-dymoe trace`` and ``vllm-dymoe report``: what is asked for, what is written, and what is refused."""

import html.parser
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

import vllm_dymoe
from tests.cli.checkpoints import command, refused
from vllm_dymoe.cli.trace import read_prompts
from vllm_dymoe.config import ConfigError
from vllm_dymoe.traces import TraceHeader, synthetic_trace
from vllm_dymoe.traces.report import page

HEADER = TraceHeader("a <model> & more", "synthetic", num_layers=4, num_experts=16, top_k=2, hidden=8)


@pytest.fixture
def trace():
    return synthetic_trace(HEADER, requests=6, prompt=8, decode=24, domains=2)


@pytest.fixture
def asked(monkeypatch):
    """What the engine would be asked for; none is started."""
    found = {}

    def record_trace(model, prompts, folder, **settings):
        found.update(settings, model=model, prompts=prompts, folder=folder)
        return {"tokens": 1234, "bytes": 5000, "folder": str(folder), "recording": len(prompts) < 3}

    monkeypatch.setattr(vllm_dymoe, "record_trace", record_trace)
    return found


# -- trace ----------------------------------------------------------------------------------------


def test_prompts_are_lines_or_objects(tmp_path):
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text('one\n\n  \n{"prompt": "two"}\n')
    objects.write_text(
        '{"prompt": "one", "domain": "code"}\n\n{"prompt": "two\\nlines"}\n{"prompt": "x", "domain": null}\n'
    )
    assert read_prompts(text) == [("one", ""), ('{"prompt": "two"}', "")]
    assert read_prompts(objects) == [("one", "code"), ("two\nlines", ""), ("x", "")]


@pytest.mark.parametrize(
    "line", ["{", "[]", '"text"', "{}", '{"prompt": 3}', '{"prompt": ""}', '{"prompt": "x", "domain": 3}']
)
def test_lines_that_are_no_prompts_are_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2, is not an object"):
        read_prompts(path)


def test_the_command_asks_for_what_it_was_told(tmp_path, asked):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    result = command("trace", "a/model", "--prompts", path, "--out", tmp_path / "out", "--max-tokens", 7, "--inputs",
                     "--limit", "1GiB", "--options", '{"hi": 16}', "--engine", '{"max_model_len": 99}')  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked == {
        "model": "a/model",
        "prompts": [("one", ""), ("two", "")],
        "folder": tmp_path / "out",
        "max_tokens": 7,
        "limit": "1GiB",
        "inputs": True,
        "options": {"hi": 16},
        "engine": {"max_model_len": 99},
    }
    assert "1234 tokens of 2 prompts, 4.9 KiB" in result.stdout
    assert f"vllm-dymoe report {tmp_path / 'out'}" in result.stdout
    assert "ends early" not in result.stdout
    path.write_text("one\ntwo\nthree\n")
    assert "ends early" in command("trace", "m", "--prompts", path, "--out", tmp_path).stdout


def test_what_cannot_be_recorded_is_refused_in_a_sentence(tmp_path, asked):
    path, out = tmp_path / "prompts.txt", tmp_path / "out"
    assert "cannot be read" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("\n \n")
    assert "has no prompts" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("one")
    assert "--options is not JSON" in refused("trace", "m", "--prompts", path, "--out", out, "--options", "{")
    assert "--engine has to be a JSON object" in refused("trace", "m", "--prompts", path, "--out", out, "--engine", "3")
    assert asked == {}


# -- report ---------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Headings and texts of a page, and where it would go for more."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.fetched, self._in = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._in = tag
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self._in in ("h1", "h2"):
            self.headings.append(data)
            self._in = None


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_has_every_picture_and_needs_nothing_else(trace, tmp_path):
    trace.save(tmp_path / "trace.safetensors")
    result = command("report", tmp_path, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page.html").read_text()
    assert text == page(trace)
    read = Page(text)
    assert read.fetched == []
    assert "url(" not in text
    assert "<script" not in text
    assert re.findall(r"<(\w+)>[^<]*a &lt;model&gt; &amp; more", text) == ["title", "h1", "dd"]
    assert "<model>" not in text
    assert len(pictures(text)) == len(read.headings) - 1 == text.count('class="seen"') == 9
    assert "nan" not in text.lower().replace("domain", "")


def test_pictures_of_inputs_are_there_if_the_trace_has_them(trace):
    inputs = torch.randn(trace.num_tokens, 4, 8).half()
    headings = Page(page(trace)).headings
    more = Page(page(replace(trace, router_inputs=inputs, next_gate=trace.experts[:, 1:].clone()))).headings
    assert set(more) - set(headings) == {"Looking ahead with the next gate"}
    assert not any("omain" in heading for heading in Page(page(replace(trace, domain=None))).headings)


def texts(picture):
    return [part.text or "" for part in picture if part.tag == "text"]


def test_domains_have_a_color_each_or_a_row_each():
    def of_domains(count):
        trace = synthetic_trace(HEADER, requests=6, prompt=8, decode=24, domains=count)
        names = [f"domain {number}" for number in range(count)]
        text = page(trace)
        section = text[text.index("How domains differ") : text.index("Domains in layer")]
        (picture,) = pictures(section)
        return section, picture, names

    section, picture, names = of_domains(4)
    assert [part.get("class") for part in picture if part.tag == "path"] == [f"line c{n}" for n in range(1, 5)]
    assert all(f"</i>{name}</span>" in section for name in names)
    shared = page(synthetic_trace(HEADER, requests=6, prompt=8, decode=24, domains=4))
    assert "domain" in shared[shared.index("Hot experts that domains share") :].split("share least")[0]
    section, picture, names = of_domains(5)
    assert not any("line" in part.get("class", "") for part in picture)
    assert [text for text in texts(picture) if "domain" in text] == names


def test_names_of_rows_have_room():
    from vllm_dymoe.traces.charts import heat_map

    (picture,) = pictures(heat_map([[1.0, 0.5]] * 3, "x", "y", "of all", ["a & b", "docs", "long " * 9]))
    names = [part for part in picture if part.get("text-anchor") == "end"]
    assert [name.text for name in names[:2]] == ["a & b", "docs"]
    assert names[2].text.endswith("…")
    ground = next(part for part in picture if part.get("class") == "ground")
    for name in names:  # letters of 12 pixels are about 7 wide
        assert 7 * len(name.text) <= float(name.get("x")) < float(ground.get("x"))


@pytest.mark.parametrize(
    ("first", "count", "want"),
    [(0, 4, [0, 1, 2, 3]), (0, 48, range(0, 48, 4)), (1, 32, [1, *range(2, 33, 2)]), (1, 128, [1, *range(8, 129, 8)])],
)
def test_axes_have_round_numbers_and_where_they_begin(first, count, want):
    from vllm_dymoe.traces.charts import Line, lines

    (picture,) = pictures(lines([Line("one", [0.5] * count)], "x", "y", first=first))
    assert [int(text) for text in texts(picture) if text.isdigit()] == list(want)
    path = next(part for part in picture if part.get("class", "").startswith("line"))
    places = [point.split()[0] for point in path.get("d").removeprefix("M").split("L")]
    for part in picture:
        if (part.text or "").isdigit():
            assert part.get("x") == places[int(part.text) - first]


@pytest.mark.parametrize("what", ["one token", "only prompts", "only answers", "one layer"])
def test_small_traces_have_a_page_too(trace, what):
    if what == "one token":
        trace = trace.select(torch.tensor([5]))
    elif what == "only prompts":
        trace = trace.select(trace.prefill)
    elif what == "only answers":
        trace = trace.select(~trace.prefill)
    else:
        trace = synthetic_trace(replace(HEADER, num_layers=1), requests=2, prompt=2, decode=2)
    assert all(len(picture) for picture in pictures(page(trace)))


def test_lines_are_where_their_values_are():
    from vllm_dymoe.traces.charts import Line, lines

    (picture,) = pictures(lines([Line("one", [0.0, 0.5, 1.0])], "x", "y"))
    path = next(part for part in picture if part.get("class", "").startswith("line"))
    (left, bottom), (middle, half), (right, top) = (
        map(float, point.split()) for point in path.get("d").removeprefix("M").split("L")
    )
    assert middle == pytest.approx((left + right) / 2, abs=0.2)
    assert half == pytest.approx((bottom + top) / 2, abs=0.2)
    assert top < bottom
    grid = [float(part.get("y1")) for part in picture if part.get("class") == "grid"]
    assert (min(grid), max(grid)) == pytest.approx((top, bottom), abs=0.2)


def test_every_value_of_a_heat_map_has_its_shade():
    from vllm_dymoe.traces.charts import heat_map

    (picture,) = pictures(heat_map([[0.0, 0.1, 0.2], [0.2, 0.2, 0.05]], "x", "y", "of all"))
    cells = {
        float(part.get("stroke-opacity")): part.get("d").count("M") for part in picture if part.get("class") == "cells"
    }
    assert cells == {1.0: 3, 0.5: 1, 0.25: 1}


def test_what_cannot_be_shown_is_refused_in_a_sentence(trace, tmp_path):
    assert "does not exist" in refused("report", tmp_path / "absent")
    assert "holds no tokens" in refused("report", tmp_path)
    trace.save(tmp_path / "trace.safetensors")
    assert "cannot be written" in refused("report", tmp_path, "--out", tmp_path / "absent" / "page.html")
    (tmp_path / "trace.safetensors").write_bytes(b"nothing of the kind")
    assert "cannot be read as a trace" in refused("report", tmp_path)
