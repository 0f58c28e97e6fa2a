"""Imports go one way, convert -> op_patches -> runtime, and `import runtime` needs NumPy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# run-om precision rounds graphs and run-om bench --plan predicts a device, which takes the lowerings and ONNX; the
# commands import them when they are called, on a host that has them. Nothing else in runtime may look left.
ALLOWED = {
    ("runtime/commands/precision.py", "op_patches"),
    ("runtime/commands/bench.py", "op_patches"),
    ("runtime/commands/bench.py", "convert"),
}
FORBIDDEN = {"runtime": {"convert", "op_patches"}, "op_patches": {"convert", "torch"}}
HEAVY = ["torch", "onnx", "onnxruntime", "acl", "soundfile", "sentencepiece", "click", "fastapi"]


@pytest.mark.parametrize("package", list(FORBIDDEN))
def test_no_package_imports_one_to_its_left(package):
    found = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            left = [n for n in names if n.split(".")[0] in FORBIDDEN[package]]
            where = path.relative_to(ROOT).as_posix()
            found += [f"{where}: {n}" for n in left if (where, n.split(".")[0]) not in ALLOWED]
    assert not found


@pytest.mark.parametrize(
    "module", ["runtime", "runtime.graphs", "runtime.sampling", "runtime.manifest", "runtime.codec", "runtime.assembly"]
)
def test_the_core_imports_with_numpy_alone(module):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import {module}"
    subprocess.run([sys.executable, "-c", blocked], check=True, cwd=ROOT)


@pytest.mark.parametrize("command", ["convert.cli", "runtime.cli"])
def test_help_needs_no_heavy_package(command):
    heavy = [m for m in HEAVY if m != "click"]
    code = f"import sys; sys.modules.update(dict.fromkeys({heavy!r})); from {command} import cli; cli(['--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0 and "Commands:" in result.stdout, result.stderr
