"""pyACL (module `acl`) with every return code checked: a failing call raises AclError with call, code and meaning.

Handles and device pointers are plain integers, as pyACL has them. Signatures and codes: ATC_AND_ACL.md C.1 and C.7
(pyACL sources, acl_base.h, rt_error_codes.h, ge_error_codes.h of CANN 8.1.RC1). `acl.get_recent_err_msg` is read right
after the failing call, in the same thread: reading clears it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from runtime.errors import BackendError, BackendUnavailableError

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # ACL_MEMCPY_*
MALLOC_HUGE_FIRST = 0
DEVICE_MEMORY = 1  # attribute of get_mem_info: HBM (ACL_HBM_MEM)
ALREADY_INITIALIZED = 100002
CANN_PACKAGE = 0  # argument of get_cann_version: the toolkit as a whole

# acl data type -> NumPy name (C.1); types that no graph here uses are absent on purpose.
DTYPE_BY_CODE = {
    0: "float32",
    1: "float16",
    2: "int8",
    3: "int32",
    4: "uint8",
    9: "int64",
    11: "float64",
    12: "bool",
    27: "bfloat16",
}

MEANINGS = {
    100000: "invalid parameter",
    100001: "ACL is not initialised",
    100002: "ACL is already initialised",
    100003: "invalid file",
    100011: "bad model id",
    100012: "the model cannot be deserialised: corrupt, truncated or incompatible .om",
    100013: "the model cannot be parsed: corrupt, truncated or incompatible .om",
    100017: "the inputs do not match the model: dataset order or count",
    100018: "the outputs do not match the model: dataset order or count",
    100019: "the model is not dynamic",
    107001: "there is no such device",
    107002: "no context in this thread",
    107003: "the stream belongs to another context",
    107004: "the model belongs to another context",
    107008: "memory address is not aligned",
    145006: "size of the model data is invalid",
    145007: "address of the model data is invalid",
    145021: "shape of the model data is invalid",
    145022: "data type of the model data is invalid",
    207001: "memory allocation failed: too many models or contexts on this device",
    207018: "the device is out of memory: too many models or contexts on it",
    300000: "a storage limit was exceeded",
    500001: "failure inside ACL; read the plog of this process (~/ascend/log/debug/plog)",
    500002: "failure in the graph engine; read the plog of this process (~/ascend/log/debug/plog)",
    500003: "failure in the runtime; read the plog of this process (~/ascend/log/debug/plog)",
    500004: "failure in the driver; read the plog of this process and check the driver",
    507000: "internal error of the runtime",
    507008: "the .om was compiled for another SoC; compile again with --soc_version of this device",
    507009: "task type not supported: vNPU slices need another .om, or use the whole card",
    507011: "the model failed while it ran: out-of-bound index, bad control value or kernel fault",
    507014: "an AICore kernel timed out",
    507015: "an AICore kernel failed: bad data, unaligned access or a kernel bug",
    507017: "an AICPU kernel timed out",
    507018: "an AICPU kernel failed: bad data or a kernel bug",
    507033: "the device could not be set up: driver, busy device or container mounts",
    507034: "a vector core timed out",
    507035: "a vector core kernel failed: bad data or a kernel bug",
    507046: "the stream timed out",
    507899: "internal error of the driver: check the device with npu-smi info",
    545601: "the model timed out",
}


def release_number(version: str) -> tuple[int, ...]:
    """A CANN release as something that compares: 8.5 = 8.5.0, and 8.0.RC3 comes before 8.0.0."""
    *numbers, label = re.fullmatch(r"(\d+)?\.?(\d+)?\.?(\d+)?(.*)", version.strip()).groups()  # type: ignore[union-attr]  # matches anything
    major, minor, patch = (int(number or 0) for number in numbers)
    candidate = re.search(r"[A-Za-z]+(\d+)", label)
    return (major, minor, patch, -1, int(candidate[1])) if candidate else (major, minor, patch, 0, 0)


def meaning(code: int) -> str:
    """What an ACL code means, in words; unknown codes say so."""
    if code in MEANINGS:
        return MEANINGS[code]
    if 507042 <= code <= 507045:
        return "a kernel met an unaligned address"
    if 545000 <= code <= 545005:
        return "failure inside the graph engine while loading: truncated .om or out of memory"
    return "a code that the reference does not list; look it up in the CANN documentation"


class AclError(BackendError):
    """A pyACL call failed."""

    def __init__(self, call: str, code: int, detail: str) -> None:
        self.call, self.code = call, code
        super().__init__(
            f"acl.{call} failed with code {code}: {meaning(code)}" + (f". ACL says: {detail}" if detail else "")
        )


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One input or output as a loaded model describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PitchedRows:
    """Rows of equal length in device memory, `pitch` bytes from one to the next."""

    pointer: int
    pitch: int


def import_acl() -> Acl:
    """The `acl` module of CANN (or the simulator that stands in for it); BackendUnavailableError says what to do."""
    try:
        module = importlib.import_module("acl")
    except ImportError as error:
        raise BackendUnavailableError(
            f"pyACL cannot be imported ({error}). Install CANN and run: source <CANN>/set_env.sh "
            "(/usr/local/Ascend/cann or /usr/local/Ascend/ascend-toolkit) before Python starts; "
            "libascend_hal.so comes from the driver (/usr/local/Ascend/driver/lib64), in a container by a mount. "
            "Without a device: --simulate"
        ) from error
    if not hasattr(module, "mdl"):
        raise BackendUnavailableError(
            f"the module acl at {getattr(module, '__file__', '?')} is not pyACL (it has no acl.mdl); "
            "remove it from the Python path and source set_env.sh of CANN"
        )
    return Acl(module)


class Acl:
    """The calls that this project makes, one method each."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def simulated(self) -> bool:
        """Whether the module is the simulator: nothing that it computes is a device result."""
        return bool(getattr(self._module, "SIMULATED", False))

    def same_module(self, other: Acl) -> bool:
        """Whether both speak to the same `acl`; tests install one simulator after the other."""
        return self._module is other._module

    @property
    def label(self) -> str:
        return "om (simulated)" if self.simulated else "om"

    def _function(self, call: str) -> Any:
        found: Any = self._module
        for part in call.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise BackendError(f"this pyACL has no acl.{call}; update CANN (reference: 8.1.RC1)")
        return found

    def _recent_message(self) -> str:
        message = self._function("get_recent_err_msg")()
        return " ".join(str(message).split()) if message else ""

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise AclError(call, code, self._recent_message())

    def _run(self, call: str, *args: Any) -> None:
        """A call that returns its code alone."""
        self._check(call, self._function(call)(*args))

    def _get(self, call: str, *args: Any) -> Any:
        """A call that returns values and then its code: one value as it is, several as a tuple."""
        *values, code = self._function(call)(*args)
        self._check(call, code)
        return values[0] if len(values) == 1 else tuple(values)

    def _create(self, call: str, *args: Any) -> int:
        """A call that returns a handle alone; 0 or None is a failure without a code."""
        handle = self._function(call)(*args)
        if not handle:
            raise AclError(call, 500001, self._recent_message())
        return int(handle)

    # -- process, device, context, stream

    def init(self) -> bool:
        """Initialise ACL; False when something else in this process (torch_npu) did so before."""
        code = self._function("init")()
        if code == ALREADY_INITIALIZED:
            return False
        self._check("init", code)
        return True

    def finalize(self) -> None:
        self._run("finalize")

    def soc_name(self) -> str:
        return str(self._function("get_soc_name")() or "unknown")

    def cann_version(self) -> str:
        """The CANN release that runs, such as 8.5.0; "unknown" where this pyACL cannot tell."""
        try:
            described = self._get("get_cann_version", CANN_PACKAGE)
        except BackendError:
            return "unknown"
        return str(described.get("version") or "unknown") if isinstance(described, dict) else "unknown"

    def set_device(self, device: int) -> None:
        self._run("rt.set_device", device)

    def reset_device(self, device: int) -> None:
        self._run("rt.reset_device", device)

    def create_context(self, device: int) -> int:
        return int(self._get("rt.create_context", device))

    def set_context(self, context: int) -> None:
        self._run("rt.set_context", context)

    def destroy_context(self, context: int) -> None:
        self._run("rt.destroy_context", context)

    def create_stream(self) -> int:
        return int(self._get("rt.create_stream"))

    def destroy_stream(self, stream: int) -> None:
        self._run("rt.destroy_stream", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._run("rt.synchronize_stream", stream)

    # -- memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        free, total = self._get("rt.get_mem_info", DEVICE_MEMORY)
        return int(free), int(total)

    def malloc(self, num_bytes: int) -> int:
        return int(self._get("rt.malloc", num_bytes, MALLOC_HUGE_FIRST))

    def free(self, pointer: int) -> None:
        self._run("rt.free", pointer)

    def malloc_host(self, num_bytes: int) -> int:
        return int(self._get("rt.malloc_host", num_bytes))

    def free_host(self, pointer: int) -> None:
        self._run("rt.free_host", pointer)

    def memset(self, pointer: int, num_bytes: int, value: int) -> None:
        self._run("rt.memset", pointer, num_bytes, value, num_bytes)

    def memcpy_async(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        self._run("rt.memcpy_async", target, num_bytes, source, num_bytes, kind, stream)

    def memcpy2d_async(
        self, target: PitchedRows, source: PitchedRows, width: int, height: int, kind: int, stream: int
    ) -> None:
        """Copy `height` rows of `width` bytes; device to device only on A2, A3 and 950 (C.6a)."""
        self._run(
            "rt.memcpy2d_async",
            *(target.pointer, target.pitch, source.pointer, source.pitch),
            *(width, height, kind, stream),
        )

    # -- models

    def query_model_size(self, path: str) -> tuple[int, int]:
        """Bytes of workspace and of weights that loading the file will take."""
        work, weights = self._get("mdl.query_size", path)
        return int(work), int(weights)

    def load_model(self, path: str) -> int:
        return int(self._get("mdl.load_from_file", path))

    def unload_model(self, model: int) -> None:
        self._run("mdl.unload", model)

    def create_description(self) -> int:
        return self._create("mdl.create_desc")

    def describe(self, description: int, model: int) -> None:
        self._run("mdl.get_desc", description, model)

    def destroy_description(self, description: int) -> None:
        self._run("mdl.destroy_desc", description)

    def model_tensors(self, description: int, side: str) -> list[ModelTensor]:
        """The inputs (side "input") or outputs of a loaded model, in the order that its datasets need."""
        count = int(self._function(f"mdl.get_num_{side}s")(description))
        tensors = []
        for index in range(count):
            name = str(self._function(f"mdl.get_{side}_name_by_index")(description, index))
            code = int(self._function(f"mdl.get_{side}_data_type")(description, index))
            dims = self._get(f"mdl.get_{side}_dims", description, index)
            size = int(self._function(f"mdl.get_{side}_size_by_index")(description, index))
            dtype = DTYPE_BY_CODE.get(code, f"acl type {code}")
            tensors.append(ModelTensor(name, dtype, tuple(int(d) for d in dims["dims"]), size))
        return tensors

    def execute_async(self, model: int, inputs: int, outputs: int, stream: int) -> None:
        self._run("mdl.execute_async", model, inputs, outputs, stream)

    # -- datasets

    def create_dataset(self) -> int:
        return self._create("mdl.create_dataset")

    def destroy_dataset(self, dataset: int) -> None:
        self._run("mdl.destroy_dataset", dataset)

    def create_data_buffer(self, pointer: int, num_bytes: int) -> int:
        return self._create("create_data_buffer", pointer, num_bytes)

    def destroy_data_buffer(self, buffer: int) -> None:
        self._run("destroy_data_buffer", buffer)

    def add_dataset_buffer(self, dataset: int, buffer: int) -> None:
        self._get("mdl.add_dataset_buffer", dataset, buffer)
