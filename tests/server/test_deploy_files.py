"""What deploy/ says is checked against this project. No image is built and no unit is started here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.commands.serve import serve
from runtime.server.settings import ServerSettings

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it for 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "moss-tts.service"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lines(path: Path, instruction: str) -> list[str]:
    """What follows the instruction, continued lines joined."""
    text = path.read_text().replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in text.splitlines() if line.split(None, 1)[:1] == [instruction]]


def parse(arguments: list[str]) -> None:
    """As run-om serve would; a UsageError for an option that it does not have."""
    serve.make_context("serve", list(arguments)).close()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed; it is in the dev extra")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_and_installs_what_the_project_has(path):
    copied = [source for line in lines(path, "COPY") for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied), copied
    packages = {package.split(".")[0] for package in PROJECT["tool"]["setuptools"]["packages"]}
    assert packages | {"pyproject.toml"} == set(copied)
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', path.read_text())
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    assert "serve" in extras


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_the_server_with_options_that_it_has(path):
    (entry,), (command,) = lines(path, "ENTRYPOINT"), lines(path, "CMD")[-1:]
    assert "run-om" in PROJECT["project"]["scripts"] and "run-om serve" in " ".join(json.loads(entry))
    parse(json.loads(command))
    port = next(option.default for option in serve.params if option.name == "port")
    assert lines(path, "EXPOSE") == [str(port)] and f"127.0.0.1:{port}/health" in path.read_text()


def test_the_unit_starts_the_server_with_options_that_it_has():
    start = shlex.split(re.search(r"^ExecStart=(.+)$", UNIT.read_text(), re.M)[1])
    assert Path(start[0]).name == "run-om" and start[1] == "serve"
    parse(start[2:])


def test_the_unit_gives_a_server_the_time_that_it_takes_to_end():
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.M)[1])
    assert stop > ServerSettings.model_fields["drain_seconds"].default + 5  # the worker's own seconds (Pool.stop)


def test_every_setting_that_deploy_names_exists():
    named = {name for path in DEPLOY.iterdir() if path.is_file() for name in
             re.findall(r"MOSS_TTS_([A-Z_]+[A-Z])", path.read_text())}  # fmt: skip
    assert named and named <= {field.upper() for field in ServerSettings.model_fields}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing(tmp_path):
    """With a program that exists in the place of ours, which is not installed under /opt here."""
    text, exchanged = re.subn(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.M)
    assert exchanged == 1
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, UNIT.name in done.stderr) == (0, False), done.stderr
