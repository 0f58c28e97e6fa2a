"""Every command that the README shows runs, on the tiny checkpoint; every link of it leads to a file."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import convert.cli
import runtime.cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
NOT_HERE = {
    "make demo": "it is the demo, run by hand",
    "make test": "it is this test run",
    "convert-moss fetch": "it downloads",
}


def test_links_lead_somewhere():
    links = [t for t in re.findall(r"\]\(([^)#]+)", README) if not t.startswith("http")]
    assert links and not [t for t in links if not (ROOT / t).exists()]


def test_every_command_is_in_the_readme_or_in_a_page_it_links():
    pages = README + "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md"))
    for program, cli in (("convert-moss", convert.cli.cli), ("run-om", runtime.cli.cli)):
        missing = [name for name in cli.list_commands(None) if not re.search(rf"{program} {name}\b", pages)]
        assert not missing, f"{program}: {missing}"


@pytest.mark.parametrize(("program", "name"), [
    (program, name) for program, cli in (("convert-moss", convert.cli.cli), ("run-om", runtime.cli.cli))
    for name in cli.list_commands(None)
])  # fmt: skip
def test_every_command_has_help(program, name):
    cli = convert.cli.cli if program == "convert-moss" else runtime.cli.cli
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0 and len(result.output.splitlines()) > 5


def test_the_commands_run_in_the_order_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("MOSS_TTS_VOICES", str(tmp_path / "voices"))
    ran = 0
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if not words or any(line.startswith(skipped) for skipped in NOT_HERE):
            continue
        if words[0] == "python":
            subprocess.run([sys.executable, str(ROOT / words[1]), *words[2:]], check=True, cwd=tmp_path)
            continue
        assert words[0] in ("convert-moss", "run-om"), line
        cli = convert.cli.cli if words[0] == "convert-moss" else runtime.cli.cli
        result = CliRunner().invoke(cli, words[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        ran += 1
    assert ran >= 8
