"""The commands that draw figures: the pictures, and refusals before measuring."""

import sys

import pytest

from vllm_dymoe.cli.bench import speeds
from vllm_dymoe.cli.figures import Panel, draw, require
from vllm_dymoe.options import ConfigError

pytest.importorskip("matplotlib")


def panel():
    found = Panel("speed", "GB", "tokens per second")
    found.lines["exact"] = [(2.0, 30.0), (1.0, 20.0)]
    found.levels["vllm"] = 25.0
    return found


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_panels_give_the_same_file(tmp_path, suffix):
    first = draw(tmp_path / "new folder" / f"first{suffix}", [panel(), panel()])
    second = draw(tmp_path / f"second{suffix}", [panel(), panel()])
    assert first.read_bytes() == second.read_bytes()
    other = panel()
    other.lines["exact"][0] = (2.0, 31.0)
    assert draw(tmp_path / f"third{suffix}", [other, panel()]).read_bytes() != first.read_bytes()


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        require(tmp_path / "speed.pdf")


def test_a_missing_matplotlib_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError):
        draw(tmp_path / "speed.png", [panel()])
    assert not (tmp_path / "speed.png").exists()


def measured(policy, batch, rate, held, link=None):
    return {"policy": policy, "batch": batch, "link MB/s": link, "tokens/s": rate, "experts peak MB": held}


def test_a_bench_draws_policies_as_lines_and_peers_as_levels():
    rows = [
        measured("exact", 1, 20.0, 5.0), measured("exact", 1, 30.0, 10.0), measured("vllm", 1, 25.0, None),
        measured("exact", 1, None, 10.0),
    ]  # fmt: skip
    found = speeds("model", rows)
    assert found.lines == {"exact": [(5.0, 20.0), (10.0, 30.0)]}
    assert found.levels == {"vllm": 25.0}


def test_a_bench_of_several_batches_and_links_has_a_line_for_each():
    rows = [
        measured("exact", batch, 20.0 * batch, 5.0, link) for batch in (1, 4) for link in (12.0, 24.0)
    ]  # fmt: skip
    assert len(speeds("model", rows).lines) == 4
