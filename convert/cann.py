"""Find a CANN installation and read its version, in both layouts: `ascend-toolkit/latest` up to 8.3, `cann` from 8.5.

The host is passed in, so that a made-up tree can stand for a machine: `root` is put before the fixed places, while
paths in environment variables are taken as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Where a locator looks, in order: variables that set_env.sh sets, then the default places.
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_SYSTEM_HOMES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
_USER_HOMES = ("Ascend/cann", "Ascend/ascend-toolkit/latest")

# A line of the wrapper script of tests/fake_cann: what it builds must never pass for a device build.
FAKE_ATC_MARK = "MOSS-FAKE-ATC"


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that is examined."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def which(self, program: str) -> Path | None:
        found = shutil.which(program, path=self.environ.get("PATH", ""))
        return Path(found) if found else None

    def run(self, *argv: str, timeout_s: float = 20) -> tuple[int, str]:
        """Exit status and output of a short command; 127 when it cannot be started, 124 when it hangs."""
        try:
            done = subprocess.run(
                argv,
                env=dict(self.environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            return 127, str(error)
        except subprocess.TimeoutExpired:
            return 124, f"{argv[0]} did not answer within {timeout_s:.0f} s"
        return done.returncode, done.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Installation:
    """One CANN installation."""

    home: Path
    layout: str  # "ascend-toolkit" (before 8.5) or "cann" (8.5 and later)
    version: str | None  # user-facing: 8.1.RC1, 8.5.0
    version_file: Path | None
    opp: Path | None
    atc: Path | None  # the atc of this installation, on PATH or not

    @property
    def set_env(self) -> Path | None:
        """The script to source: beside `latest` in the old layout, inside the directory in the new one."""
        for path in (self.home / "set_env.sh", self.home.parent / "set_env.sh"):
            if path.is_file():
                return path
        return None


def locate(host: Host) -> Installation | None:
    """The installation that the environment names, else the first one at a default place; None without CANN."""
    for home in _homes(host):
        if home.is_dir():
            return _installation(host, home)
    atc = host.which("atc")
    if atc is None:
        return None
    # <home>/bin/atc or <home>/compiler/bin/atc
    parents = atc.resolve().parents
    home = parents[2] if parents[1].name == "compiler" else parents[1]
    return _installation(host, home)


def other_installations(host: Host, chosen: Installation) -> list[Path]:
    """Homes other than the chosen one, each real directory once."""
    homes = {home.resolve(): home for home in _homes(host) if home.is_dir()}
    homes.pop(chosen.home.resolve(), None)
    return list(homes.values())


def is_fake_atc(atc: Path) -> bool:
    """True for the stand-in of the tests."""
    try:
        with atc.open("rb") as file:
            return FAKE_ATC_MARK.encode() in file.read(4096)
    except OSError:
        return False


def sourced_environment(host: Host, set_env: Path) -> dict[str, str]:
    """The environment after `source set_env.sh`; the unchanged one when the script fails."""
    code, output = host.run("bash", "-c", 'source "$1" >/dev/null 2>&1 && env -0', "bash", str(set_env))
    if code:
        return dict(host.environ)
    return dict(pair.split("=", 1) for pair in output.split("\0") if "=" in pair)


def _homes(host: Host) -> Iterator[Path]:
    for variable in HOME_VARIABLES:
        if value := host.environ.get(variable):
            yield Path(value)
    yield from (host.root / place for place in _SYSTEM_HOMES)
    if user := host.environ.get("HOME"):
        yield from (Path(user) / place for place in _USER_HOMES)


def _installation(host: Host, home: Path) -> Installation:
    version, version_file = _version(home)
    layout = "ascend-toolkit" if home.resolve().parent.name == "ascend-toolkit" else "cann"
    opp = next((p for p in (_opp_variable(host), home / "opp") if p is not None and p.is_dir()), None)
    on_path = host.which("atc")
    atc = next((p for p in (home / "bin/atc", home / "compiler/bin/atc") if p.is_file()), on_path)
    return Installation(home, layout, version, version_file, opp, atc)


def _opp_variable(host: Host) -> Path | None:
    value = host.environ.get("ASCEND_OPP_PATH")
    return Path(value) if value else None


def _version(home: Path) -> tuple[str | None, Path | None]:
    """Version and the file that says it; `version_dir` is the user-facing one of the two numbers in version.info."""
    patterns: Sequence[tuple[str, str]] = (
        ("*-linux/ascend_toolkit_install.info", r"^version=(\S+)"),
        ("ascend_toolkit_install.info", r"^version=(\S+)"),
        ("version.cfg", r"^\w*running_version=\[[^\]:]*:([^\]\s]+)\]"),
        *((f"{part}/version.info", r"^version_dir=(\S+)") for part in ("compiler", "opp", "runtime", "toolkit")),
        ("share/info/*/version.info", r"^version_dir=(\S+)"),
    )
    for pattern, line in patterns:
        for path in sorted(home.glob(pattern)):
            match = re.search(line, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if match:
                return match[1].removeprefix("cann-"), path
    match = re.fullmatch(r"(?:cann-)?(\d+\.\d+\S*)", home.resolve().name)
    return (match[1], home.resolve()) if match else (None, None)
