"""The environment doctor on made-up machines: both layouts, and each thing that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from convert import cann, cann_doctor
from convert.cann import Host, locate
from convert.cann_doctor import CannReport, examine_cann, soc_names
from convert.cli import cli
from op_patches.targets import Target
from tests.fake_cann.tree import OP_CONFIG, make_tree, write_program

TARGET = Target(soc="Ascend910B3")
NPU_SMI = """/bin/cat <<'END'
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.5        35                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3405 / 65536         |
+===========================+===============+====================================================+
END
"""


class Machine:
    """A made-up machine: programs in bin/, a tree under its root."""

    def __init__(self, root: Path, version: str = "8.5.0", layout: str = "cann", **tree: object) -> None:
        self.root, self.bin = root, root / "usr/bin"
        self.home = make_tree(root, version, layout, **tree)  # type: ignore[arg-type]
        self.environ = {
            "PATH": f"{self.home}/bin:{self.bin}",
            "HOME": str(root),
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_OPP_PATH": f"{self.home}/opp",
        }
        driver = root / "usr/local/Ascend/driver/lib64/driver/libascend_hal.so"
        driver.parent.mkdir(parents=True)
        driver.touch()
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   67108864 kB\n")
        write_program(self.bin / "npu-smi", NPU_SMI)
        self.python()

    def python(
        self, version: tuple[int, int, int] = (3, 10, 4), numpy: str | None = "1.26.4", missing: str = ""
    ) -> None:
        """A python3 that answers the probe, and has no acl."""
        answer = {"version": version, "path": "/usr/bin/python3", "numpy": numpy, "missing": missing.split()}
        write_program(self.bin / "python3", f"case $2 in *acl*) exit 1;; esac\necho '{json.dumps(answer)}'\n")

    def examine(self, target: Target | None = TARGET, free: int = 100 << 30) -> CannReport:
        return examine_cann(target, Host(self.root, self.environ), self.root, lambda _: free)


def found(report: CannReport, topic: str) -> list[tuple[str, str]]:
    return [(f.severity, f"{f.message} -> {f.fix}") for f in report.findings if f.topic == topic]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_good_machine_has_nothing_to_complain_about(machine: Machine) -> None:
    report = machine.examine()
    assert {f.severity for f in report.findings} == {"ok"}, "\n".join(report.lines())
    assert report.exit_code == 0
    assert json.loads(json.dumps(report.to_dict()))["cann"]["version"] == "8.5.0"


def test_without_cann_there_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    report = examine_cann(TARGET, Host(tmp_path, {"PATH": str(tmp_path), "HOME": str(tmp_path)}))
    assert report.exit_code == 3
    assert len(report.lines()) == 1
    assert "no CANN on this machine" in report.lines()[0]


@pytest.mark.parametrize(("version", "layout"), [("8.1.RC1", "ascend-toolkit"), ("8.5.0", "cann")])
def test_version_and_layout_are_read_with_and_without_the_environment(
    tmp_path: Path, version: str, layout: str
) -> None:
    home = make_tree(tmp_path, version, layout)
    for environ in (
        {"HOME": "/nowhere", "PATH": ""},
        {"PATH": f"{home}/bin"},
        {"PATH": "", "ASCEND_TOOLKIT_HOME": str(home)},
    ):
        installation = locate(Host(tmp_path, environ))
        assert installation is not None
        assert (installation.version, installation.layout) == (version, layout)
        assert installation.set_env is not None and installation.set_env.is_file()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("version.cfg", "# x\ntoolkit_running_version=[7.7.0.1.238:8.0.0]\n"),
        ("compiler/version.info", "Version=7.7.0.1.238\nversion_dir=8.0.0\n"),
        ("toolkit/version.info", "Version=7.7.0.1.238\nversion_dir=8.0.0\n"),
    ],
)
def test_older_version_files_are_read_too(tmp_path: Path, file: str, text: str) -> None:
    home = make_tree(tmp_path, "8.1.RC1", "ascend-toolkit")
    next(home.glob("*-linux/*.info")).unlink()
    (home / file).parent.mkdir(exist_ok=True)
    (home / file).write_text(text)
    installation = locate(Host(tmp_path, {"PATH": ""}))
    assert installation is not None and installation.version == "8.0.0"


def test_an_atc_on_path_alone_leads_to_its_installation(tmp_path: Path) -> None:
    home = make_tree(tmp_path / "opt", "8.5.0")
    installation = locate(Host(tmp_path / "empty", {"PATH": f"{home}/bin"}))
    assert installation is not None and installation.home == home.resolve()


def test_another_release_than_the_targets_is_a_warning_with_the_target_to_use(tmp_path: Path) -> None:
    ((_, ok), (severity, text)) = found(Machine(tmp_path, "8.1.RC1", "ascend-toolkit").examine(), "version")
    assert "CANN 8.1.RC1" in ok and "before 8.5" in ok
    assert severity == "warning" and "--target 910B3,cann=8.1.RC1" in text


def test_two_installations_are_a_warning(machine: Machine) -> None:
    make_tree(machine.root, "8.1.RC1", "ascend-toolkit")
    assert any("other installations" in text for _, text in found(machine.examine(), "version"))


def test_a_missing_ops_package_is_a_fault_with_the_chip_to_install_for(tmp_path: Path) -> None:
    report = Machine(tmp_path, ops=("ascend310p",)).examine()
    ((severity, text),) = found(report, "ops")
    assert severity == "fault" and report.exit_code == 1
    assert "no ops package for Ascend910B3 (ascend910b); ops present for: ascend310p" in text
    assert "install the ops package for 910b of CANN 8.5.0" in text


def test_a_soc_that_the_toolkit_does_not_know_is_a_fault(machine: Machine) -> None:
    next(machine.home.resolve().rglob("platform_config/Ascend910B3.ini")).unlink()
    ((severity, text),) = found(machine.examine(), "ops")
    assert severity == "fault" and "no platform file for Ascend910B3" in text


def test_the_device_is_named_and_a_wrong_target_found(machine: Machine) -> None:
    assert soc_names(Host(machine.root, machine.environ)) == ["Ascend910B3"]
    (_, (severity, text)) = found(machine.examine(Target(soc="Ascend910B4")), "device")
    assert severity == "warning" and "--target soc=Ascend910B3" in text


def test_the_names_of_310p_and_a3_are_read(machine: Machine) -> None:
    host = Host(machine.root, machine.environ)
    write_program(machine.bin / "npu-smi", NPU_SMI.replace("910B3", "310P3"))
    assert soc_names(host) == ["Ascend310P3"]
    board = "Chip Name : Ascend910\n NPU Name : 9391\n"
    write_program(
        machine.bin / "npu-smi", f"[ $# = 1 ] && echo '| 0     Ascend910           | OK |' || echo '{board}'\n"
    )
    assert soc_names(host) == ["Ascend910_9391"]


def test_acl_names_the_soc_where_npu_smi_is_missing(machine: Machine) -> None:
    (machine.bin / "npu-smi").unlink()
    write_program(machine.bin / "python3", "echo soc=Ascend910B2\n")
    assert soc_names(Host(machine.root, machine.environ)) == ["Ascend910B2"]


def test_a_machine_without_a_device_can_compile(machine: Machine) -> None:
    (machine.bin / "npu-smi").unlink()
    report = machine.examine()
    assert found(report, "device")[0][0] == "note"
    assert report.exit_code == 0


def test_a_missing_driver_names_the_library_path_for_compiling(machine: Machine) -> None:
    next((machine.root / "usr/local/Ascend/driver").rglob("*.so")).unlink()
    ((severity, text),) = found(machine.examine(), "driver")
    assert severity == "warning" and "devlib" in text


@pytest.mark.parametrize(
    ("version", "severity"),
    [((3, 6, 9), "fault"), ((3, 7, 0), "ok"), ((3, 11, 9), "ok"), ((3, 12, 1), "warning"), ((3, 13, 0), "fault")],
)
def test_python_versions(machine: Machine, version: tuple[int, int, int], severity: str) -> None:
    machine.python(version)
    assert found(machine.examine(), "python")[0][0] == severity


@pytest.mark.parametrize(
    ("cann", "layout", "numpy", "severity"),
    [
        ("8.1.RC1", "ascend-toolkit", "2.1.0", "fault"),
        ("8.2.RC1", "ascend-toolkit", "2.1.0", "fault"),
        ("8.5.0", "cann", "2.1.0", "note"),
        ("8.5.0", "cann", "1.26.0", "ok"),
        ("8.5.0", "cann", None, "fault"),
    ],
)
def test_numpy_2_is_a_fault_where_it_breaks_the_op_compiler(
    tmp_path: Path, cann: str, layout: str, numpy: str | None, severity: str
) -> None:
    machine = Machine(tmp_path, cann, layout)
    machine.python(numpy=numpy)
    assert found(machine.examine(), "python")[1][0] == severity


def test_missing_python_packages_are_named_as_pip_names_them(machine: Machine) -> None:
    machine.python(missing="attr absl google.protobuf")
    severity, text = found(machine.examine(), "python")[-1]
    assert severity == "fault"
    assert text.endswith("/usr/bin/python3 -m pip install attrs absl-py protobuf")


def test_a_python_that_does_not_run_is_a_fault(machine: Machine) -> None:
    write_program(machine.bin / "python3", "exit 1\n")
    assert found(machine.examine(), "python")[0][0] == "fault"


def test_the_environment_of_another_installation_is_a_fault(machine: Machine) -> None:
    machine.environ["ASCEND_OPP_PATH"] = str(machine.root)
    assert ("fault" in dict(found(machine.examine(), "environment"))) is True
    machine.environ["ASCEND_OPP_PATH"] = "/nowhere"
    assert any("is no directory" in text for _, text in found(machine.examine(), "environment"))
    del machine.environ["ASCEND_OPP_PATH"]
    machine.environ["PATH"] = str(machine.bin)
    texts = [text for _, text in found(machine.examine(), "environment")]
    assert all(f"source {machine.home}/set_env.sh" in text for text in texts) and len(texts) == 2


def test_an_opp_that_does_not_know_the_hf32_names_is_reported(machine: Machine) -> None:
    listing = machine.home / OP_CONFIG / "impl_mode/all_ops_impl_mode.ini"
    listing.write_text("Conv2DV2=x\n" + listing.read_text().split("\n", 1)[1])
    ((severity, text),) = found(machine.examine(), "precision")
    assert severity == "warning" and "does not list Conv2D;" in text


@pytest.mark.parametrize(("free", "severity"), [(1 << 30, "fault"), (5 << 30, "warning"), (50 << 30, "ok")])
def test_disk_space(machine: Machine, free: int, severity: str) -> None:
    assert {s for s, _ in found(machine.examine(free=free), "disk")} == {severity}


def test_little_memory_suggests_one_compiler_process(machine: Machine) -> None:
    (machine.root / "proc/meminfo").write_text("MemAvailable:   8388608 kB\n")
    ((severity, text),) = found(machine.examine(), "memory")
    assert severity == "warning" and "TE_PARALLEL_COMPILER=1" in text
    machine.environ["TE_PARALLEL_COMPILER"] = "1"
    assert found(machine.examine(), "memory")[0][0] == "ok"


def test_the_command_prints_the_findings_and_exits_with_their_code(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**machine.environ, "LD_LIBRARY_PATH": ""}.items():
        monkeypatch.setenv(name, value)

    monkeypatch.setattr(cann, "_SYSTEM_HOMES", ())  # what this machine has does not count
    monkeypatch.setattr(cann_doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 30))

    def doctor(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["doctor", *arguments], catch_exceptions=False)

    done = doctor("--cann", "--target", "910B3", "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["exit_code"], data["cann"]["version"]) == (0, 0, "8.5.0")
    assert "Ascend910B3 is ascend910b" in doctor("--cann", "--target", "910B3").stdout
    assert doctor("--cann", "--target", "A3").exit_code == 1
    assert doctor("--target", "A3", "checkpoint").exit_code == 2
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path / "nothing"))
    without = doctor("--cann")
    assert (without.exit_code, len(without.stdout.splitlines())) == (3, 1)
