"""Examine the CANN installation before ATC runs into it: `convert-moss doctor --cann`.

Every probe returns findings; each says what was found and, unless all is well, what to do. The machine is passed in as
a Host, so that a made-up tree can stand for one. Facts and their sources: docs/atc.md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from convert.atc import FLOAT32_OP_TYPES
from convert.cann import Host, Installation, locate, other_installations
from op_patches.targets import Release, Target
from runtime.errors import ReadinessError

NO_CANN_EXIT_CODE = 3
_OPS = "built-in/op_impl/ai_core/tbe"
# What CANN's own prereq_check asks for, then what op compilation has been seen to need besides.
_REQUIRED_MODULES = {
    "attr": "attrs", "decorator": "decorator", "sympy": "sympy", "cffi": "cffi", "absl": "absl-py",
    "psutil": "psutil", "scipy": "scipy", "google.protobuf": "protobuf", "cloudpickle": "cloudpickle",
    "ml_dtypes": "ml-dtypes", "tornado": "tornado",
}  # fmt: skip
_PYTHON_PROBE = """
import importlib.util as u, json, sys
def have(name):
    try: return u.find_spec(name) is not None
    except ImportError: return False
try:
    import numpy; numpy_version = numpy.__version__
except ImportError: numpy_version = None
print(json.dumps({"version": sys.version_info[:3], "path": sys.executable, "numpy": numpy_version,
                  "missing": [n for n in sys.argv[1:] if not have(n)]}))
"""
_LAST_NUMPY_1_RELEASE = Release.parse("8.2.99")
_GIB = 1 << 30

Severity = Literal["ok", "note", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class CannFinding:
    """One thing that was looked at."""

    severity: Severity
    topic: str  # version, environment, ops, device, driver, python, disk, memory, precision
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.severity:<8} {self.topic:<12} {self.message}" + (f"\n{'':22}-> {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class CannReport:
    """All findings; without an installation there is exactly one line to say."""

    installation: Installation | None
    findings: tuple[CannFinding, ...]

    @property
    def exit_code(self) -> int:
        """0: ATC can run; 1: a fault stands in its way; 3: no CANN on this machine."""
        if self.installation is None:
            return NO_CANN_EXIT_CODE
        return int(any(finding.severity == "fault" for finding in self.findings))

    def lines(self) -> list[str]:
        return [str(finding) for finding in self.findings]

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        home = self.installation
        return {
            "cann": None if home is None else {"home": str(home.home), "layout": home.layout, "version": home.version},
            "exit_code": self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine_cann(
    target: Target | None = None,
    host: Host | None = None,
    artifacts: Path | None = None,
    disk_free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> CannReport:
    """Look at everything ATC depends on; with a target also at what its SoC needs."""
    host = host or Host()
    installation = locate(host)
    if installation is None:
        message = "no CANN on this machine (ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME, /usr/local/Ascend, ~/Ascend, PATH)"
        return CannReport(None, (CannFinding("note", "cann", message + "; plans and scripts work without it"),))
    probes = (
        _version(host, installation, target),
        _environment(host, installation),
        _ops(installation, target),
        _device(host, target),
        _driver(host, installation),
        _python(host, installation),
        _precision(installation),
        _resources(host, artifacts, disk_free),
    )
    return CannReport(installation, tuple(finding for probe in probes for finding in probe))


def _version(host: Host, cann: Installation, target: Target | None) -> Iterator[CannFinding]:
    era = "8.5 and later" if cann.layout == "cann" else "before 8.5"
    if cann.version is None:
        yield CannFinding(
            "warning", "version", f"{cann.home}: no version file found (layout of {era})",
            "look into the *.info files of the installation and name the release with --target cann=…",
        )  # fmt: skip
        return
    yield CannFinding("ok", "version", f"CANN {cann.version} in {cann.home} (layout of {era}; {cann.version_file})")
    others = [str(path) for path in other_installations(host, cann)]
    if others:
        yield CannFinding(
            "warning", "version", f"there are other installations: {', '.join(others)}",
            "source the set_env.sh of the one you mean, in a fresh shell",
        )  # fmt: skip
    release = _release(cann.version)
    if release is None:
        yield CannFinding("warning", "version", f"{cann.version} is no release name that the tables know")
    elif target is not None and release.numbers[:2] != target.release.numbers[:2]:
        yield CannFinding(
            "warning", "version", f"the target says cann={target.cann}, installed is {cann.version}",
            f"--target {target.soc.removeprefix('Ascend')},cann={cann.version} checks against what is installed",
        )  # fmt: skip


def _environment(host: Host, cann: Installation) -> Iterator[CannFinding]:
    source = f"source {cann.set_env}" if cann.set_env else "install the toolkit again: set_env.sh is missing"
    atc = host.which("atc")
    if atc is None:
        yield CannFinding("warning" if cann.set_env else "fault", "environment", "atc is not on PATH", source)
    else:
        yield CannFinding("ok", "environment", f"atc is {atc}")
    opp = host.environ.get("ASCEND_OPP_PATH")
    if opp is None:
        yield CannFinding("warning", "environment", "ASCEND_OPP_PATH is not set", source)
    elif not Path(opp).is_dir():
        yield CannFinding("fault", "environment", f"ASCEND_OPP_PATH={opp} is no directory (E10501 follows)", source)
    elif not Path(opp).resolve().is_relative_to(cann.home.resolve()):
        yield CannFinding(
            "fault", "environment", f"ASCEND_OPP_PATH={opp} belongs to another installation than {cann.home}",
            f"open a fresh shell and {source}",
        )  # fmt: skip


def _ops(cann: Installation, target: Target | None) -> Iterator[CannFinding]:
    if cann.opp is None:
        yield CannFinding(
            "fault", "ops", f"{cann.home} has no opp directory, so every operator is unsupported (EZ3003)",
            "install the ops package of the chip (a package of its own from CANN 8.5 on)",
        )  # fmt: skip
        return
    present = sorted(path.name for path in (cann.opp / _OPS / "config").glob("ascend*") if path.is_dir())
    found = f"ops present for: {', '.join(present) or 'no chip'}"
    if target is None:
        yield CannFinding("ok" if present else "fault", "ops", found, "" if present else "install the ops package")
        return
    inis = [
        p for pattern in ("*", "*/*", "*/*/*") for p in cann.home.glob(f"{pattern}/platform_config/{target.soc}.ini")
    ]
    if not inis:
        yield CannFinding(
            "fault", "ops", f"this toolkit has no platform file for {target.soc}",
            "check the name (npu-smi info) or install a CANN that knows the chip",
        )  # fmt: skip
        return
    short = re.search(r"^Short_SoC_version\s*=\s*(\S+)", inis[0].read_text(errors="replace"), re.MULTILINE)
    wanted = short[1].lower() if short else f"ascend{target.family}"
    if wanted in present:
        yield CannFinding("ok", "ops", f"{target.soc} is {wanted}; {found}")
    else:
        yield CannFinding(
            "fault", "ops", f"no ops package for {target.soc} ({wanted}); {found}",
            f"install the ops package for {wanted.removeprefix('ascend')} of CANN {cann.version}; "
            "without it ATC reports LayerNorm, MatMulV2 … as unsupported",
        )  # fmt: skip


def _device(host: Host, target: Target | None) -> Iterator[CannFinding]:
    names = soc_names(host)
    if not names:
        yield CannFinding("note", "device", "no NPU found (npu-smi, acl): this machine can compile, not run")
        return
    yield CannFinding("ok", "device", f"NPU: {', '.join(names)}")
    if target is not None and target.soc not in names:
        yield CannFinding(
            "warning", "device", f"the target is {target.soc}; its .om will not load on {', '.join(names)} (EE1001)",
            f"--target soc={names[0]}, unless you compile for another machine",
        )  # fmt: skip


def soc_names(host: Host) -> list[str]:
    """The --soc_version of each NPU kind here: from npu-smi, else from acl; empty without a device."""
    code, output = host.run("npu-smi", "info")
    names = [] if code else re.findall(r"^\|\s*\d+\s+(\d{3}[A-Z]\w*(?:-\d)?)\s*\|", output, re.MULTILINE)
    if names:
        return [f"Ascend{name}" for name in dict.fromkeys(names)]
    if code == 0:  # A3 names its chips in the board information only
        code, output = host.run("npu-smi", "info", "-t", "board", "-i", "0", "-c", "0")
        chip = re.search(r"^\s*Chip Name\s*:\s*(\S+)", output, re.MULTILINE)
        npu = re.search(r"^\s*NPU Name\s*:\s*(\S+)", output, re.MULTILINE)
        if code == 0 and chip and npu:
            return [f"{chip[1]}_{npu[1]}"]
    code, output = host.run("python3", "-c", "import acl; print('soc=' + str(acl.get_soc_name()))")
    acl = re.search(r"^soc=(Ascend\S+)", output, re.MULTILINE)
    return [acl[1]] if code == 0 and acl else []


def _driver(host: Host, cann: Installation) -> Iterator[CannFinding]:
    searched = [Path(p) for p in host.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    searched += [host.root / "usr/local/Ascend/driver" / sub for sub in ("lib64", "lib64/driver", "lib64/common")]
    if any((directory / "libascend_hal.so").exists() for directory in searched):
        yield CannFinding("ok", "driver", "libascend_hal.so is found")
        return
    devlib = next(iter(sorted(cann.home.glob("*-linux/devlib"))), cann.home / "<arch>-linux/devlib")
    yield CannFinding(
        "warning", "driver", "libascend_hal.so is not found: no driver, or not mounted into the container",
        f'to compile without a driver: export LD_LIBRARY_PATH="{devlib}:$LD_LIBRARY_PATH"',
    )  # fmt: skip


def _python(host: Host, cann: Installation) -> Iterator[CannFinding]:
    code, output = host.run("python3", "-c", _PYTHON_PROBE, *_REQUIRED_MODULES)
    try:
        data = json.loads(output.strip().splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        data = None
    if data is None:
        yield CannFinding(
            "fault", "python", "python3 on PATH does not run; the op compiler needs it", "install Python 3.8 to 3.11"
        )
        return
    version = tuple(data["version"])
    text = f"{data['path']} is Python {'.'.join(map(str, version))}"
    if (3, 7) <= version[:2] <= (3, 11):
        yield CannFinding("ok", "python", text)
    else:
        severity: Severity = "fault" if version[:2] >= (3, 13) or version[:2] < (3, 7) else "warning"
        yield CannFinding(
            severity, "python", f"{text}; CANN 8.1 accepts 3.7 to 3.11, and op compilation fails on 3.13",
            "put a Python 3.8 to 3.11 first on PATH for ATC",
        )  # fmt: skip
    yield from _numpy(data["numpy"], cann)
    missing = [_REQUIRED_MODULES[name] for name in data["missing"]]
    if missing:
        yield CannFinding(
            "fault", "python", f"the op compiler misses {', '.join(missing)}",
            f"{data['path']} -m pip install {' '.join(missing)}",
        )  # fmt: skip


def _numpy(version: str | None, cann: Installation) -> Iterator[CannFinding]:
    release = _release(cann.version)
    fix = "python3 -m pip install 'numpy<2' in the interpreter that ATC uses"
    if version is None:
        yield CannFinding("fault", "python", "the op compiler misses NumPy", fix)
    elif int(version.split(".", maxsplit=1)[0]) < 2:
        yield CannFinding("ok", "python", f"NumPy {version}")
    elif release is not None and release > _LAST_NUMPY_1_RELEASE:
        yield CannFinding(
            "note", "python", f"NumPy {version}; CANN up to 8.2 needs NumPy 1, later ones are not known to"
        )
    else:
        yield CannFinding(
            "fault", "python", f"NumPy {version} breaks the op compiler of CANN up to 8.2 (np.float_)", fix
        )


def _precision(cann: Installation) -> Iterator[CannFinding]:
    """Does this opp know the operator names that turn HF32 off?"""
    listing = cann.opp / _OPS / "impl_mode/all_ops_impl_mode.ini" if cann.opp else None
    if listing is None or not listing.is_file():
        yield CannFinding("note", "precision", "all_ops_impl_mode.ini is not there: the HF32-off names are not checked")
        return
    known = {line.split("=", 1)[0].strip() for line in listing.read_text(errors="replace").splitlines() if "=" in line}
    unknown = [name for name in FLOAT32_OP_TYPES if name not in known]
    if unknown:
        yield CannFinding(
            "warning", "precision", f"{listing.name} does not list {', '.join(unknown)}; HF32 may stay on for them",
            "look for the new name of the operator in that file and report it",
        )  # fmt: skip
    else:
        yield CannFinding("ok", "precision", "the operator names that turn HF32 off are known to this opp")


def _resources(host: Host, artifacts: Path | None, disk_free: Callable[[Path], int]) -> Iterator[CannFinding]:
    places = {"the artifacts": artifacts, "ATC's cache (~/atc_data)": Path(host.environ.get("HOME", "/"))}
    for what, place in places.items():
        if place is None or not place.exists():
            continue
        free = disk_free(place)
        severity: Severity = "fault" if free < 2 * _GIB else "warning" if free < 10 * _GIB else "ok"
        fix = (
            "" if severity == "ok" else "make room: each .om carries its own copy of the weights, and ATC keeps a cache"
        )
        yield CannFinding(severity, "disk", f"{free / _GIB:.1f} GB free for {what} ({place})", fix)
    meminfo = host.root / "proc/meminfo"
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text() if meminfo.is_file() else "", re.MULTILINE)
    if match:
        available = int(match[1]) * 1024
        workers = host.environ.get("TE_PARALLEL_COMPILER", "8")
        if available < 16 * _GIB and workers != "1":
            yield CannFinding(
                "warning", "memory", f"{available / _GIB:.1f} GB of memory for {workers} compiler processes",
                "export TE_PARALLEL_COMPILER=1 if ATC is killed",
            )  # fmt: skip
        else:
            yield CannFinding("ok", "memory", f"{available / _GIB:.1f} GB of memory")


def _release(version: str | None) -> Release | None:
    try:
        return Release.parse(version) if version else None
    except ReadinessError:
        return None
