"""A stand-in for `atc`, for tests: it parses its arguments, reads the ONNX file, refuses, prints, litters and exits as
the reference documents (docs/atc.md), and writes a container instead of an .om (runtime/backends/fake_om.py).

A test asks for a failure through the environment:
    FAKE_ATC_FAIL="prefill-*=E20001;step*=killed"   output name pattern = code or one of ENDINGS
    FAKE_ATC_LAYOUT=8|9                             message layout; by default that of the CANN version of the tree
    FAKE_ATC_SECONDS=0.5                            how long a compilation takes
    FAKE_ATC_INPUT_ORDER=reversed                   order of the inputs in the compiled model
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from convert.atc_memory import bind_shapes
from convert.cann import Host, locate
from op_patches.readiness.check import check_model
from op_patches.readiness.report import Severity
from op_patches.targets import Target
from runtime.backends.fake_om import FakeOm, OmTensor, WeightsFile, write_fake_om
from runtime.errors import ReadinessError
from runtime.manifest import sha256_of

FAILED = 255
ENDINGS = (
    "killed", "hang", "crash", "no_verdict", "no_success_line", "exit0_no_file", "exit0_empty_file", "exit1_with_file",
    "exit1_after_success", "two_files", "suffix", "inner", "no_message", "numpy2", "missing_module", "disk_full",
)  # fmt: skip

VALUE_OPTIONS = {
    "mode", "model", "weight", "om", "json", "framework", "output", "soc_version", "input_format", "input_shape",
    "input_shape_range", "input_hint_shape", "dynamic_batch_size", "dynamic_image_size", "dynamic_dims",
    "precision_mode", "precision_mode_v2", "modify_mixlist", "keep_dtype", "customize_dtypes", "op_precision_mode",
    "op_select_implmode", "optypelist_for_implmode", "output_type", "out_nodes", "input_fp16_nodes", "log",
    "deterministic", "external_weight", "host_env_os", "host_env_cpu", "insert_op_conf", "singleop",
    "fusion_switch_file", "op_debug_level", "debug_dir", "op_compiler_cache_mode", "op_compiler_cache_dir",
    "jit_compile", "virtual_type", "buffer_optimize", "enable_small_channel", "export_compile_stat", "check_report",
    "enable_compress_weight", "compress_weight_conf", "core_type", "aicore_num", "save_original_model", "oo_level",
}  # fmt: skip
GEARS = ("dynamic_batch_size", "dynamic_image_size", "dynamic_dims", "input_shape_range")
EXCLUSIVE = (
    *((a, b, "E10009") for i, a in enumerate(GEARS) for b in GEARS[i + 1 :]),
    ("precision_mode", "precision_mode_v2", "E10056"),
    ("dynamic_dims", "insert_op_conf", "E10009"),
    *(("input_hint_shape", gear, "E10009") for gear in GEARS[:3]),
    ("enable_compress_weight", "compress_weight_conf", "E10047"),
    ("singleop", "framework", "E10009"),
    ("singleop", "insert_op_conf", "E10009"),
)
PRECISION_V2 = ("fp16", "origin", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16", "cube_hif8", "mixed_hif8")
PRECISION_V1 = (
    "force_fp16", "force_fp32", "cube_fp16in_fp32out", "allow_fp32_to_fp16", "must_keep_origin_dtype",
    "allow_mix_precision", "allow_mix_precision_fp16", "allow_mix_precision_bf16", "allow_fp32_to_bf16",
)  # fmt: skip
V1_TO_V2 = {
    "force_fp16": "fp16", "must_keep_origin_dtype": "origin", "force_fp32": "cube_fp16in_fp32out",
    "allow_mix_precision": "mixed_float16", "allow_mix_precision_fp16": "mixed_float16",
    "allow_mix_precision_bf16": "mixed_bfloat16",
}  # fmt: skip
PATH_OPTIONS = ("model", "output", "op_precision_mode", "keep_dtype", "modify_mixlist", "om", "json")
PATH = re.compile(r"[A-Za-z0-9_./\-\u4e00-\u9fff]+")


class AtcMessageError(Exception):
    """An error with a code, as ATC collects it."""

    def __init__(self, code: str, text: str, cause: str = "", solution: str = "") -> None:
        super().__init__(text)
        self.code, self.text, self.cause, self.solution = code, text, cause, solution


@dataclass
class Machine:
    """What the made-up tree and the environment say."""

    host: Host = field(default_factory=Host)
    cann: str = "8.5.0"
    home: Path | None = None

    @staticmethod
    def here() -> Machine:
        host = Host()
        found = locate(host)
        if found is None or found.version is None:
            raise AtcMessageError(
                "E40001", "The environment variable [ASCEND_HOME_PATH] is not set.", "", "source set_env.sh"
            )
        return Machine(host, found.version, found.home)

    @property
    def layout(self) -> int:
        return int(os.environ.get("FAKE_ATC_LAYOUT") or (9 if int(self.cann.split(".")[0]) >= 9 else 8))


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print("usage: atc <args>\n  --mode --model --framework --output --soc_version --input_shape … (a fake)")
        return 0
    options = parse(argv)
    if options is None:
        return FAILED
    print("ATC start working now, please wait for a moment.", flush=True)
    machine = Machine()
    try:
        machine = Machine.here()
        if options.get("mode", "0") == "6":
            describe(options, machine)
        else:
            compile_model(options, machine)
    except AtcMessageError as failure:
        return report(failure, machine)
    ending = asked_ending(Path(options.get("output", "")).name)
    if ending != "no_success_line":
        print("...\nATC run success, welcome to the next use.", flush=True)
    return FAILED if ending == "exit1_after_success" else 0


def parse(argv: list[str]) -> dict[str, str] | None:
    """`--a=b`, `--a b`, one dash or two, '-' in a name as '_'; a stray word is an error on stderr."""
    options: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            print(f"ERROR: Non-option parameter: {word}", file=sys.stderr)
            return None
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name not in VALUE_OPTIONS:
            print(f"ERROR: unknown command line flag '{name}'", file=sys.stderr)
            return None
        if not equals:
            if not words:
                print(f"ERROR: flag '{name}' is missing its argument", file=sys.stderr)
                return None
            value = words.pop(0)
        options[name] = value
    return options


def compile_model(options: dict[str, str], machine: Machine) -> None:
    check_options(options, machine)
    model_path, output = Path(options["model"]), Path(options["output"])
    model = load(model_path)
    shapes = input_shapes(options, model)
    litter()
    ending = asked_ending(output.name)
    time.sleep(float(os.environ.get("FAKE_ATC_SECONDS", "0")))
    before_file(ending, options, model)
    soc, precision = options["soc_version"], precision_of(options)
    readiness(model_path, machine, soc, precision, shapes)
    om = container(options, machine, model, model_path, shapes, precision)
    suffix = f"_linux_{os.uname().machine}" if ending == "suffix" else ""
    write_fake_om(output.with_name(f"{output.name}{suffix}.om"), om)
    after_file(ending, output)


def check_options(options: dict[str, str], machine: Machine) -> None:
    for name in ("model", "framework", "output", "soc_version"):
        if not options.get(name):
            code = "E10054" if name == "soc_version" or name in options else "E10007"
            raise AtcMessageError(code, f"The required parameter [--{name}] for ATC is empty.", "", "Specify it.")
    for first, second, code in EXCLUSIVE:
        if first in options and second in options:
            raise AtcMessageError(code, f"--{first} and --{second} are mutually exclusive.", "", "Drop one of them.")
    values = {
        "framework": ("5",),
        "log": ("null", "debug", "info", "warning", "error"),
        "deterministic": ("0", "1"),
        "input_format": ("ND", "NCHW", "NCDHW"),
        "precision_mode_v2": PRECISION_V2,
        "precision_mode": PRECISION_V1,
        "mode": ("0", "6"),
    }
    for name, allowed in values.items():
        if name in options and options[name] not in allowed:
            code = "E10010" if name == "log" else "E10001"
            raise AtcMessageError(
                code, f"Value [{options[name]}] for parameter [--{name}] is invalid. Reason: not in {allowed}."
            )
    for name in PATH_OPTIONS:
        if name in options and not PATH.fullmatch(options[name]):
            raise AtcMessageError(
                "E10021", f"The path of parameter [--{name}] [{options[name]}] contains invalid characters."
            )
    if not Path(options["output"]).name or options["output"].endswith("/"):
        raise AtcMessageError("E10022", f"The value of --output [{options['output']}] has no file name.")
    for name in ("op_precision_mode", "keep_dtype", "modify_mixlist"):
        if name in options and not Path(options[name]).is_file():
            raise AtcMessageError(
                "E10001", f"Value [{options[name]}] for parameter [--{name}] is invalid. Reason: no such file."
            )
    mixed = precision_of(options).startswith("mixed_")
    if "modify_mixlist" in options and not mixed:
        raise AtcMessageError("E10001", "--modify_mixlist needs a mixed precision mode.")
    if machine.home is not None and not any(machine.home.rglob(f"data/platform_config/{options['soc_version']}.ini")):
        raise AtcMessageError("E10001", f"Value [{options['soc_version']}] for parameter [--soc_version] is invalid.")
    if any(gear in options for gear in GEARS):
        raise AtcMessageError("E10001", "This stand-in compiles static graphs only.")


def load(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise AtcMessageError("E10041", f"Failed to load the model from [{path}].") from error
    if not model.graph.input or not model.graph.output:
        raise AtcMessageError(
            "E16001", "The model has no input node." if not model.graph.input else "The model has no output node."
        )
    for weights in external_files(model):
        if not (path.parent / weights).is_file():
            raise AtcMessageError(
                "E10041", f"Failed to load the model from [{path}]. Reason: [{weights}] does not exist."
            )
    return model


def external_files(model: onnx.ModelProto) -> list[str]:
    locations = [e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"]
    return sorted(set(locations))


def input_shapes(options: dict[str, str], model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes from --input_shape, checked against the graph."""
    constants = {t.name for t in model.graph.initializer}
    declared = {v.name: v.type.tensor_type.shape.dim for v in model.graph.input if v.name not in constants}
    inner = {name for node in model.graph.node for name in (node.name, *node.output)}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (p for p in options.get("input_shape", "").split(";") if p):
        name, colon, numbers = part.rpartition(":")
        if not colon or not re.fullmatch(r"(?:-?\d+(?:,-?\d+)*)?", numbers):
            raise AtcMessageError(
                "E10002", f"Value for parameter [--input_shape] is invalid. Reason: [{part}] is malformed."
            )
        if name not in declared:
            code = "E10017" if name in inner else "E10016"
            what = "must be Data" if code == "E10017" else "is not found in the model"
            raise AtcMessageError(
                code, f"Opname [{name}] specified in --input_shape {what}.", "", "Check the input names."
            )
        shape = tuple(int(n) for n in numbers.split(",")) if numbers else ()
        if len(shape) != len(declared[name]):
            raise AtcMessageError(
                "E10049", f"The rank of input [{name}] in --input_shape [{numbers}] is not the model's."
            )
        if any(n < 1 for n in shape):
            raise AtcMessageError(
                "E10011", f"Dimension of input [{name}] in --input_shape must be positive, got [{numbers}]."
            )
        for n, dim in zip(shape, declared[name], strict=True):
            if dim.HasField("dim_value") and dim.dim_value != n:
                raise AtcMessageError(
                    "E10001", f"Value [{numbers}] for input [{name}] is not the model's {dim.dim_value}."
                )
        shapes[name] = shape
    for name, dims in declared.items():
        if name not in shapes:
            if not all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in dims):
                raise AtcMessageError("E10007", f"The required parameter [--input_shape] misses input [{name}].")
            shapes[name] = tuple(dim.dim_value for dim in dims)
    return shapes


def precision_of(options: dict[str, str]) -> str:
    if "precision_mode_v2" in options:
        return options["precision_mode_v2"]
    mode = options.get("precision_mode", "force_fp16")
    return V1_TO_V2.get(mode, mode)


def readiness(path: Path, machine: Machine, soc: str, precision: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse what the tables of op_patches refuse, with the code that they predict."""
    try:
        target = Target(cann=machine.cann, soc=soc, precision=precision)
    except ReadinessError as error:
        raise AtcMessageError(
            "E10001", f"Value [{soc}] for parameter [--soc_version] is invalid. Reason: {error}"
        ) from error
    for finding in check_model(path, target, shapes).findings:
        if finding.severity in (Severity.REFUSED, Severity.NO_KERNEL):
            raise AtcMessageError(
                finding.code, refusal_text(finding.code, finding.node, finding.op_type, finding.message)
            )


def refusal_text(code: str, node: str, op_type: str, message: str) -> str:
    if code == "E13010":
        return f"No operator plugin is registered for Op: {node}, optype: ai.onnx::17::{op_type}."
    if code == "EZ3002":
        return f"Optype [{op_type}] of Ops kernel [AIcoreEngine] is unsupported. Op name: [{node}]. Reason: {message}"
    if code == "EZ3003":
        return f"No supported Ops kernel and engine are found for [{node}], optype [{op_type}]. Reason: {message}"
    return f"Op [{node}] optype [{op_type}]: {message}"


def container(
    options: dict[str, str],
    machine: Machine,
    model: onnx.ModelProto,
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    precision: str,
) -> FakeOm:
    inputs = [OmTensor(n, n, elem_dtype(model.graph.input, n), shape) for n, shape in shapes.items()]
    if os.environ.get("FAKE_ATC_INPUT_ORDER") == "reversed":
        inputs.reverse()
    producer = {name: (node.name, i) for node in model.graph.node for i, name in enumerate(node.output)}
    outputs = []
    for name, shape in output_shapes(model, path, shapes).items():
        node, index = producer[name]
        outputs.append(OmTensor(f"{node}:{index}:{name}", name, elem_dtype(model.graph.output, name), shape))
    weights = tuple(
        WeightsFile(f, (path.parent / f).stat().st_size, sha256_of(path.parent / f)) for f in external_files(model)
    )
    text = {
        name: Path(options[name]).read_text(encoding="utf-8") if name in options else "" for name in PATH_OPTIONS[3:5]
    }
    weight_bytes = sum(
        int(np.prod(t.dims, dtype=np.int64)) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for t in model.graph.initializer
    )
    return FakeOm(
        graph_onnx=path.read_bytes(),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        soc_version=options["soc_version"],
        cann_version=machine.cann,
        precision=precision,
        weights_directory=str(path.parent.resolve()),
        weights=weights,
        options=options,
        keep_dtype=tuple(text["keep_dtype"].split()),
        modify_mixlist=json.loads(text["modify_mixlist"] or "{}"),
        weight_bytes=weight_bytes,
        work_bytes=1 << 20,
    )


def elem_dtype(values: object, name: str) -> str:
    value = next(v for v in values if v.name == name)  # type: ignore[attr-defined]
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def output_shapes(model: onnx.ModelProto, path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes that inference finds; where it does not reach an output, those that a run on zeros gives."""
    names = [value.name for value in model.graph.output]
    found = {}
    for value in bind_shapes(model, shapes).graph.output:
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            found[value.name] = tuple(dim.dim_value for dim in dims)
    if len(found) == len(names):
        return {name: found[name] for name in names}
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {n: np.zeros(shape, elem_dtype(model.graph.input, n)) for n, shape in shapes.items()}
    return {n: v.shape for n, v in zip(names, session.run(names, feeds), strict=True)}


def litter() -> None:
    """What ATC leaves in the directory it runs in."""
    for directory in ("kernel_meta", "extra-info"):
        Path(directory).mkdir(exist_ok=True)
    Path("fusion_result.json").write_text("[]\n", encoding="utf-8")


def asked_ending(name: str) -> str:
    for entry in (e for e in os.environ.get("FAKE_ATC_FAIL", "").split(";") if e):
        pattern, _, ending = entry.partition("=")
        if fnmatch.fnmatch(name, pattern):
            assert ending in ENDINGS or re.fullmatch(r"[EW][A-Z0-9]\d{4}", ending), ending
            return ending
    return ""


def before_file(ending: str, options: dict[str, str], model: onnx.ModelProto) -> None:
    """The endings that leave no .om."""
    node = model.graph.node[len(model.graph.node) // 2]
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "crash":
        print("Segmentation fault (core dumped)", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if ending == "hang":
        time.sleep(3600)
    if ending == "no_verdict":
        sys.exit(0)
    if ending == "no_message":
        raise AtcMessageError("", "")
    if ending == "inner":
        raise AtcMessageError("EZ9999", f"build graph failed, graph id:0, node [{node.name}]")
    if ending == "numpy2":
        plog("AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use `np.float64` instead.")
        raise AtcMessageError("E20001", f"Failed to compile Op [{node.name}]. (optype: [{node.op_type}])")
    if ending == "missing_module":
        plog("ModuleNotFoundError: No module named 'decorator'")
        raise AtcMessageError("E40020", "Failed to import Python module [te]. Reason: No module named 'decorator'.")
    if ending == "disk_full":
        raise AtcMessageError("E19999", f"write {options['output']} failed: No space left on device")
    if re.fullmatch(r"[EW][A-Z0-9]\d{4}", ending):
        raise AtcMessageError(
            ending,
            f"Failed to compile Op [{node.name}]. (optype: [{node.op_type}]). Reason: asked for by the test.",
            "The test asked for it.",
            "Ask for something else.",
        )


def after_file(ending: str, output: Path) -> None:
    """The endings in which file, status and verdict do not agree."""
    file = output.with_name(output.name + ".om")
    if ending == "exit0_no_file":
        file.unlink()
    if ending == "exit0_empty_file":
        file.write_bytes(b"")
    if ending == "two_files":
        output.with_name(output.name + "_linux_x86_64.om").write_bytes(file.read_bytes())
    if ending == "exit1_with_file":
        raise AtcMessageError("E19999", "save the model failed at the end")


def plog(text: str) -> None:
    root = os.environ.get("ASCEND_PROCESS_LOG_PATH") or str(Path(os.environ["HOME"]) / "ascend/log")
    directory = Path(root) / "debug" / "plog"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"plog-{os.getpid()}_20260101000000000.log").write_text(
        f"[ERROR] TEFUSION({os.getpid()},atc.bin): {text}\n"
    )


def report(failure: AtcMessageError, machine: Machine) -> int:
    """The failure verdict and the error block, all on stdout."""
    print("...\nATC run failed, Please check the detail log, Try 'atc --help' for more information")
    stamp, pid = "2026-01-01-00:00:00.000.000", os.getpid()
    inner = failure.code[2:] in ("9999", "8888")
    if not failure.code:
        print("E19999: Internal Error!\nAn unknown error occurred. Please check the log.")
        return FAILED
    if inner:
        print(f"{failure.code}: Inner Error!")
        print(f"{failure.code}[PID: {pid}] {stamp} Inner_Error({failure.code}):  {failure.text}"
              if machine.layout == 9 else f"{failure.code}: [PID: {pid}] {stamp} {failure.text}")  # fmt: skip
    elif machine.layout == 9:
        print(f"[PID: {pid}] {stamp} Invalid_Argument({failure.code}): {failure.text}")
    else:
        print(f"{failure.code}: [PID: {pid}] {stamp} {failure.text}")
    print(f"        Possible Cause: {failure.cause or 'N/A'}\n        Solution: {failure.solution or 'N/A'}")
    print("        TraceBack (most recent call last):\n        Failed to build the graph.[FUNC:Build][FILE:ge.cc]")
    if failure.code.startswith("E2"):
        print(f"        EZ9999: [PID: {pid}] {stamp} a follow-up error of the inner kind")
    return FAILED


def describe(options: dict[str, str], machine: Machine) -> None:
    """--mode=6: what an .om says about itself."""
    from runtime.backends.fake_om import read_fake_om

    if set(options) - {"mode", "om"} or "om" not in options:
        raise AtcMessageError("E10057", "--mode=6 works only with --om.")
    om = read_fake_om(Path(options["om"]))
    print(f"atc_cmdline: {' '.join(f'--{k}={v}' for k, v in om.options.items())}")
    print(f"soc_version: {om.soc_version}\natc_version: {machine.cann}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
