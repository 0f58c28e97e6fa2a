"""convert-moss check: exit codes, the three forms of output, and a directory of graphs."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result

from convert.cli import cli

READY = "g (float[B,4] x) => (float[B,4] y) { y = Neg (x) }"
REFUSED = "h (float[2,3] z) => (float[3,2] y) { y = Transpose (z) }"


def _write(path: Path, text: str, opset: int = 17) -> Path:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}'), path)
    return path


def _check(*args: object) -> Result:
    result = CliRunner().invoke(cli, ["check", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_ready_graph_leaves_with_0_and_the_verdict_first(tmp_path: Path) -> None:
    result = _check(_write(tmp_path / "a.onnx", READY), "--input-shape", "x:1,4")
    assert result.exit_code == 0
    assert "ready for cann=8.5,soc=Ascend910B4,precision=origin; 1 nodes: 1 on AICore" in result.stdout.splitlines()[0]


def test_a_refused_graph_leaves_with_1_and_says_code_node_fix_and_source(tmp_path: Path) -> None:
    result = _check(_write(tmp_path / "a.onnx", REFUSED))
    assert result.exit_code == 1
    for part in (
        "NOT ready",
        "[EZ9999]",
        "must input the attr of perm",
        "at: Transpose_0",
        "lowering transpose",
        "source:",
    ):
        assert part in result.stdout


def test_what_cannot_be_checked_leaves_with_2_and_one_line_on_stderr(tmp_path: Path) -> None:
    good = _write(tmp_path / "a.onnx", READY)
    empty = tmp_path / "empty"
    empty.mkdir()
    for args in (
        [tmp_path / "absent.onnx"],
        [good, "--target", "soc=Ascend910B"],
        [good, "--input-shape", "x=1,4"],
        [good, "--input-shape", "x:1,a"],
        [empty],
        [tmp_path, "--input-shape", "nowhere:1"],
    ):
        result = _check(*args)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_notes_are_shown_on_request(tmp_path: Path) -> None:
    graph = _write(tmp_path / "a.onnx", READY)
    assert "axes B of x are open" not in _check(graph).stdout
    assert "1 notes are not shown" in _check(graph).stdout
    assert "axes B of x are open" in _check(graph, "--notes").stdout


def test_json_lists_every_finding(tmp_path: Path) -> None:
    result = _check(_write(tmp_path / "a.onnx", REFUSED), "--json", "--target", "310P3")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["ready"] is False
    (report,) = data["reports"]
    assert report["target"] == "cann=8.5,soc=Ascend310P3,precision=fp16"
    assert [f["rule"] for f in report["findings"] if f["blocking"]] == ["plugin.transpose-perm"]


def test_a_directory_gives_each_graph_the_shapes_of_its_own_inputs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    _write(tmp_path / "a.onnx", READY)
    _write(tmp_path / "sub" / "b.onnx", REFUSED)
    result = _check(tmp_path, "--input-shape", "x:1,4", "--json")
    assert result.exit_code == 1
    reports = json.loads(result.stdout)["reports"]
    assert [Path(report["graph"]).name for report in reports] == ["a.onnx", "b.onnx"]
    assert [report["ready"] for report in reports] == [True, False]


class _Page(HTMLParser):
    """Collects text, and every address that would need a network."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "br", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect",):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone_says_the_verdict_first_and_escapes_names(tmp_path: Path) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> ' + REFUSED)
    model.graph.node[0].name = "<script>alert(1)</script>"
    onnx.save(model, tmp_path / "a.onnx")
    _write(tmp_path / "b.onnx", READY)
    file = tmp_path / "page.html"
    assert _check(tmp_path, "--html", file).exit_code == 1
    content = file.read_text(encoding="utf-8")
    page = _Page()
    page.feed(content)
    assert page.open == []
    assert page.addresses == []
    assert "<script" not in content
    text = [part.strip() for part in page.text if part.strip()]
    assert "Not ready for cann=8.5,soc=Ascend910B4,precision=origin: 1 blocking findings in 1 graph of 2." in text
    assert text.index(next(t for t in text if t.startswith("Not ready"))) < text.index("EZ9999")
    assert "<script>alert(1)</script>" in text


def test_the_page_of_a_ready_graph_is_green(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert _check(_write(tmp_path / "a.onnx", READY), "--html", file, "--input-shape", "x:1,4").exit_code == 0
    assert "verdict good" in file.read_text(encoding="utf-8")
    assert "verdict bad" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["x:1,4", " x:1,4 ;", "x:1,4;"])
def test_input_shape_is_read_as_atc_reads_it(text: str, tmp_path: Path) -> None:
    assert _check(_write(tmp_path / "a.onnx", READY), "--input-shape", text).exit_code == 0
