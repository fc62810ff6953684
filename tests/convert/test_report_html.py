"""report.html and the text tables: true numbers, sound HTML, nothing from outside, whatever the report holds."""

import html
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mosaic.convert import report_html, report_tables
from mosaic.convert.report_html import render
from mosaic.convert.report_layer_plots import GAUSSIAN_DB
from mosaic.convert.report_rows import Survey
from mosaic.format import e4m3
from support.reports import Model, make_report, summarise

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert('x')</script>\"&\u202e\x1b[2J\ud800$x$"
PLAIN = Model(mtp=True, head="e4m3")
VARIANTS = {
    "plain": PLAIN,
    "mse": Model(mse=True),
    "kept": Model(treatment="keep"),
    "head-only": Model(treatment="keep", head="e4m3"),
    "pass-through": Model(treatment="pass-through", mtp=True),
    "part-measured": Model(treatment="pass-through", head="e4m3"),
    "one-layer": Model(layers=1),
    "one-expert": Model(layers=2, experts=1),
    "no-layers": Model(layers=0, mtp=True),
    "exact": Model(exact=True),
    "huge": Model(sigma=1e30),
    "tiny": Model(sigma=1e-36),
}
#: Pictures there should be; each comes for a page and for a phone.
PICTURES = {"kept": 0, "pass-through": 3, "exact": 3}


class Page(HTMLParser):
    """Checks that tags are balanced; collects rows of cells, text and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.rows = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def cell(self, row, column, after="layer"):
        """A cell by the name of its row and column, in the first table whose heading begins so."""
        start = next(number for number, cells in enumerate(self.rows) if cells[0] == after)
        line = next(cells for cells in self.rows[start:] if cells[0] == row)
        return line[self.rows[start].index(column)]


@pytest.fixture(scope="module")
def reports():
    return {name: make_report(model) for name, model in VARIANTS.items()}


@pytest.fixture(scope="module")
def pages(reports):
    return {name: render(report, f"model {name}") for name, report in reports.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_report_gives_a_sound_page(pages, name):
    page = Page(pages[name])
    assert page.tags.count("svg") == 2 * PICTURES.get(name, 5)
    shown = " ".join(page.texts)
    assert f"model {name}" in shown
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", shown)
    assert "�" not in pages[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_comes_from_outside(pages, name):
    page = Page(pages[name])
    assert not re.findall(r"[a-z]+://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", pages[name]))
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    links = [value for key, value in page.attributes if key in ("href", "src", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import", pages[name])


def test_ids_are_unique_and_found(pages):
    page = Page(pages["plain"])
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for key, value in page.attributes if key == "href"} | set(
        re.findall(r"url\(#(\w+)\)", pages["plain"])
    )
    assert used <= set(ids)
    assert len(used) > 10


def test_no_placeholder_colour_is_left(pages):
    pictures = "".join(re.findall(r"<svg.*?</svg>", pages["plain"], re.S))
    assert not re.search(r"#[0-9a-f]{6}\b", pictures)
    variables = set(re.findall(r"var\((--[\w-]+)\)", pages["plain"]))
    assert all(f"{variable}:" in pages["plain"] for variable in variables)


def test_hostile_names_are_text(reports):
    report = make_report(PLAIN)
    for entry in report["tensors"]:
        entry["name"] = HOSTILE
        entry["note"] = HOSTILE
    report |= {"dropped": [HOSTILE], "unlisted_in_source": [HOSTILE] * 300, "recipe": HOSTILE}
    text = render(report, HOSTILE)
    text.encode()
    page = Page(text)
    assert "script" not in page.tags
    assert not set(text) & set("\u202e\x1b\ud800")
    assert sum("<script>alert('x')" in part for part in page.texts) > 20
    assert "… and 100 more: see report.json" in "".join(page.texts)
    assert report_tables.worst(report).isascii()
    assert "\x1b" not in report_tables.worst(report)


def test_equal_reports_give_equal_bytes(pages, tmp_path):
    """In another process, too, and whatever the user's matplotlibrc says."""
    (tmp_path / "matplotlibrc").write_text(
        "lines.linewidth: 9\nfont.size: 30\nsvg.fonttype: path\naxes.facecolor: red\n"
    )
    code = (
        "import sys; from support.reports import *; from mosaic.convert.report_html import render\n"
        "sys.stdout.reconfigure(encoding='utf-8'); print(render(make_report(Model(mse=True)), 'model mse'), end='')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    tests = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(tests), "MATPLOTLIBRC": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout.decode() == pages["mse"]


def test_settings_of_matplotlib_are_left_alone(reports):
    import matplotlib as mpl

    names = mpl.rcParams.keys() - {"backend"}  # reading that one loads pyplot
    before = {name: mpl.rcParams[name] for name in names}
    render(reports["one-layer"], "model")
    assert {name: mpl.rcParams[name] for name in names} == before


@pytest.mark.parametrize("module", ["report_html", "report_tables", "cli"])
def test_matplotlib_is_loaded_for_drawing_only(module):
    check = f"import sys, mosaic.convert.{module}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def quantized(report, **wanted):
    return [
        entry
        for entry in report["tensors"]
        if entry["treatment"] == "e4m3" and all(entry[key] == value for key, value in wanted.items())
    ]


def decibels(entries, noise="noise"):
    total = {key: math.fsum(entry[key] for entry in entries) for key in ("signal", noise)}
    return f"{10 * math.log10(total['signal'] / total[noise]):.2f}"


def test_numbers_of_the_page_are_those_of_the_entries(reports, pages):
    report, page = reports["plain"], Page(pages["plain"])
    shown = " ".join(" ".join(page.texts).split())
    entries = quantized(report)
    loss = math.sqrt(sum(entry["noise"] for entry in entries) / sum(entry["signal"] for entry in entries))
    zeroed = sum(round(entry["zeroed_share"] * math.prod(entry["shape"])) for entry in entries)
    for fact in (
        f"{decibels(entries)} dB",
        f"{loss:.2%}",
        f"{zeroed:,} weights",
        f"{len(report['tensors']):,} tensors",
    ):
        assert fact in shown, fact
    for layer in range(4):
        for role, name in (("routed_experts", "routed experts"), ("shared_expert", "shared expert")):
            assert page.cell(str(layer), name) == decibels(quantized(report, role=role, layer=layer))
        codes = np.sum([row["codes"] for row in report["histograms"] if row["layer"] == layer], axis=0)
        assert page.cell(str(layer), "subnormal") == f"{codes[1:8].sum() / codes.sum():.4%}"
        members = quantized(report, layer=layer)
        assert page.cell(str(layer), "scale min") == f"{min(entry['scale_min'] for entry in members):.2e}"
        assert page.cell(str(layer), "scale max") == f"{max(entry['scale_max'] for entry in members):.2e}"
    assert page.cell("3", "attention") == decibels(quantized(report, role="attention", layer=3))
    assert page.cell("MTP", "attention") == decibels(quantized(report, role="attention", part="mtp"))
    assert page.cell("head", "LM head") == decibels(quantized(report, role="lm_head"))
    assert page.cell("0", "attention") == ""


def test_numbers_of_the_summary_are_those_of_the_report(reports, pages):
    page = Page(pages["plain"])
    row = reports["plain"]["summary"][0]
    assert page.cell("routed experts", "SQNR dB", "class") == f"{row['sqnr_db']:.2f}"
    assert page.cell("routed experts", "tensors", "class") == str(row["tensors"])
    assert page.cell("routed experts", "subnormal", "class") == f"{row['subnormal_share']:.4%}"
    assert page.cell("embedding", "SQNR dB", "class") == "as is"
    assert page.cell("final norm", "treatment", "class") == "keep"


def test_pictures_say_the_lowest_class_and_tensor(reports, pages):
    report = reports["plain"]
    lowest = min(
        float(decibels(members))
        for layer in (0, 1, 2, 3, None)
        for role in {entry["role"] for entry in quantized(report)}
        if (members := quantized(report, role=role, layer=layer))
    )
    texts = [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", pages["plain"])]
    assert len([text for text in texts if text.startswith("lowest: ") and text.endswith(f": {lowest:.2f}")]) == 2
    experts = [entry["sqnr_db"] for entry in quantized(report, role="routed_experts", part="decoder")]
    assert texts.count(f"{len(experts)} tensors, worst {min(experts):.2f} dB") == 2


def test_worst_tensors_are_the_worst(reports, pages):
    entries = sorted(quantized(reports["plain"]), key=lambda entry: entry["sqnr_db"])
    page = Page(pages["plain"])
    start = next(number for number, cells in enumerate(page.rows) if cells[0] == "tensor")
    assert [cells[0] for cells in page.rows[start + 1 : start + 21]] == [entry["name"] for entry in entries[:20]]
    assert page.rows[start + 1][1:4] == [
        f"{entries[0]['sqnr_db']:.2f}",
        f"{entries[0]['relative_l2']:.2%}",
        f"{entries[0]['max_abs_error']:.2e}",
    ]
    lines = report_tables.worst(reports["plain"], 3).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [entry["name"] for entry in entries[:3]]


def test_gain_of_the_mse_rule(reports, pages):
    members = quantized(reports["mse"], role="routed_experts")
    page = Page(pages["mse"])
    start = next(number for number, cells in enumerate(page.rows) if "gain, dB" in cells)
    row = dict(zip(page.rows[start], page.rows[start + 1], strict=True))
    noise, amax_noise = (sum(entry[key] for entry in members) for key in ("noise", "amax_noise"))
    assert row["class"] == "routed experts"
    assert row["mse, dB"] == decibels(members)
    assert row["amax, dB"] == decibels(members, "amax_noise")
    assert row["gain, dB"] == f"{10 * math.log10(amax_noise / noise):+.3f}"
    assert not any("gain, dB" in cells for cells in Page(pages["plain"]).rows)


def test_table_by_layer(reports):
    lines = report_tables.by_layer(reports["plain"]).splitlines()
    assert " ".join(lines[0].split()) == "layer routed shared attn linear head subnormal zero scale min scale max"
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2", "3", "head", "MTP"]
    assert len({len(line) for line in lines}) == 1
    assert all(line.isascii() for line in lines)
    assert lines[1].split()[1] == decibels(quantized(reports["plain"], role="routed_experts", layer=0))


def test_tables_without_a_measured_error(reports):
    assert report_tables.by_layer(reports["kept"]) == "no tensor is stored as E4M3"
    assert report_tables.worst(reports["kept"]) == "no measured tensor differs from its source"
    assert report_tables.worst(reports["exact"]) == "no measured tensor differs from its source"
    assert "exact" in report_tables.by_layer(reports["exact"])
    assert report_tables.by_layer(reports["pass-through"]).count("as is") == 4 * 3 + 3


def test_what_is_not_e4m3_but_lossy_is_told():
    """FP8 dequantised, or a recipe that narrows F32: no figure by layer, but among the worst."""
    report = make_report(Model(treatment="keep"))
    entry = report["tensors"][0]
    entry |= {"treatment": "bf16", "relative_l2": 0.0017, "sqnr_db": 55.4, "max_abs_error": 1e-4}
    entry |= {"zeroed_share": 0.0, "signal": 1.0, "noise": 0.0017**2, "note": "FP8, but ragged"}
    report["summary"] = summarise(report["tensors"])
    text = render(report, "model")
    assert "1 other tensor changed its dtype" in text
    assert "1 tensor of routed experts: FP8, but ragged" in text
    assert entry["name"] in report_tables.worst(report)


def test_scales_and_codes_are_counted(reports):
    survey = Survey(reports["plain"])
    blocks = sum(sum(row["scales"].values()) for row in reports["plain"]["histograms"])
    assert sum(survey.overall.scales.values()) == blocks
    assert sum(survey.overall.codes) == sum(sum(row["codes"]) for row in reports["plain"]["histograms"])


def test_normal_weights_have_the_sqnr_that_is_called_normal():
    weights = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    difference = e4m3.dequantize(*e4m3.quantize(weights)) - weights
    ratio = np.square(weights, dtype=np.float64).sum() / np.square(difference, dtype=np.float64).sum()
    assert 10 * math.log10(ratio) == pytest.approx(GAUSSIAN_DB, abs=0.01)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (35_107_000_000, "35.1 GB"),
    ],
)
def test_sizes(nbytes, text):
    assert report_html.size(nbytes) == text


def test_a_large_model_gives_a_small_page():
    """As many tensors as Qwen3.6-35B-A3B has."""
    report = make_report(Model(layers=40, experts=256, mtp=True, head="e4m3"))
    assert len(report["tensors"]) > 31_000
    assert len(render(report, "large").encode()) < 700_000
