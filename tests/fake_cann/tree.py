"""Make a directory that looks like a CANN installation, with the fake `atc` in it.

    python -m tests.fake_cann.tree DIRECTORY [--version 8.5.0] [--layout cann|ascend-toolkit]

prints the set_env.sh to source. Files and their contents follow docs/atc.md; nothing in the tree is Huawei's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convert.cann import FAKE_ATC_MARK

PROJECT = Path(__file__).resolve().parents[2]
OP_CONFIG = "opp/built-in/op_impl/ai_core/tbe"
SHORT_NAMES = {
    "Ascend910B1": "Ascend910B", "Ascend910B2": "Ascend910B", "Ascend910B3": "Ascend910B", "Ascend910B4": "Ascend910B",
    "Ascend910_9391": "Ascend910_93", "Ascend310P3": "Ascend310P", "Ascend910B": "Ascend910",
}  # fmt: skip
PRECISION_NAMES = ("Conv2D", "Conv2DTransposeD", "DepthwiseConv2D", "MatMulV2", "BatchMatMulV2")


def make_tree(
    root: Path,
    version: str = "8.5.0",
    layout: str = "cann",
    ops: Sequence[str] = ("ascend910b", "ascend310p"),
    with_atc: bool = True,
) -> Path:
    """Write the tree under `root` (as if it were "/") and return the home of the installation."""
    ascend = root / "usr/local/Ascend"
    if layout == "cann":
        real, home = ascend / f"cann-{version}", ascend / "cann"
        _write(real / "set_env.sh", _set_env(home))
        _write(real / "opp/version.info", f"Version=8.5.0.1\nversion_dir=cann-{version}\n")
    else:
        real, home = ascend / "ascend-toolkit" / version, ascend / "ascend-toolkit/latest"
        _write(ascend / "ascend-toolkit/set_env.sh", _set_env(home))
        _write(
            real / "x86_64-linux/ascend_toolkit_install.info", f"package_name=Ascend-cann-toolkit\nversion={version}\n"
        )
    home.symlink_to(real)
    for soc, short in SHORT_NAMES.items():
        _write(
            real / f"x86_64-linux/data/platform_config/{soc}.ini",
            f"[version]\nSoC_version={soc}\nShort_SoC_version={short}\n",
        )
    for name in ops:
        _write(real / OP_CONFIG / f"config/{name}/aic-{name}-ops-info.json", "{}\n")
    _write(
        real / OP_CONFIG / "impl_mode/all_ops_impl_mode.ini",
        "".join(f"{n}=high_performance,high_precision,enable_float_32_execution\n" for n in PRECISION_NAMES),
    )
    (real / "python/site-packages").mkdir(parents=True)
    if with_atc:
        write_atc(real / "bin/atc")
    return home


def write_atc(path: Path) -> None:
    """The wrapper: like the real one a bash script that sets paths and passes everything on."""
    script = Path(__file__).with_name("atc_bin.py")
    _write(
        path,
        f"#!/bin/bash\n# {FAKE_ATC_MARK}: a stand-in for tests, not Huawei's compiler\n"
        f'PYTHONPATH="{PROJECT}" exec "{sys.executable}" "{script}" "$@"\n',
        0o755,
    )


def write_program(path: Path, text: str) -> None:
    """An executable shell script, such as a made-up npu-smi."""
    _write(path, "#!/bin/bash\n" + text, 0o755)


def _set_env(home: Path) -> str:
    return (
        f'export ASCEND_TOOLKIT_HOME="{home}"\nexport ASCEND_HOME_PATH="{home}"\nexport ASCEND_OPP_PATH="{home}/opp"\n'
        f'export PATH="{home}/bin:$PATH"\nexport LD_LIBRARY_PATH="{home}/lib64:$LD_LIBRARY_PATH"\n'
    )


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--version", default="8.5.0")
    parser.add_argument("--layout", default="cann", choices=["cann", "ascend-toolkit"])
    arguments = parser.parse_args()
    made = make_tree(arguments.directory.resolve(), arguments.version, arguments.layout)
    print(made / "set_env.sh" if arguments.layout == "cann" else made.parent / "set_env.sh")
