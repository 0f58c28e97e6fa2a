"""`--backend` and its options: the right backend, or a message that says what is missing; never a silent fallback."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from runtime.backends import om_device
from runtime.backends.cann_provider import CannBackend, read_placement
from runtime.backends.npu import prepare_npu
from runtime.backends.ort import OrtBackend, spin_entries
from runtime.backends.select import BackendOptions, device_number, open_backend
from runtime.backends.simulator import SimulatorConfig, installed, uninstall
from runtime.errors import BackendError, BackendUnavailableError
from runtime.spec import GraphSpec, TensorSpec
from tests.runtime.om_builds import compile_llm

pytestmark = pytest.mark.parametrize("golden_llm", ["a"], indirect=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BackendOptions(name="tpu"), "no backend tpu; backends: ort, torch, om, auto"),
        (BackendOptions(name="ort", simulate=True), "--simulate .* needs --backend om, not ort"),
        (BackendOptions(name="torch", provider="cann"), "--provider cann belongs to --backend ort"),
        (BackendOptions(name="ort", provider="cuda"), "no provider cuda; providers: cpu, cann"),
        (BackendOptions(name="torch", device_graphs=True), "--device-graphs belongs to --backend ort on the CPU"),
        (BackendOptions(name="ort", precision="fp16"), "--precision chooses between .om builds"),
        (BackendOptions(name="ort", device="npu:0"), "--backend ort runs on the CPU, not on npu:0"),
        (BackendOptions(name="torch", device="cuda:0"), "runs on cpu or npu:N, not on cuda:0"),
        (BackendOptions(name="om", device="first", simulate=True), "--device first: expected a number"),
    ],
)
def test_contradictions_are_refused(golden_llm, options: BackendOptions, words: str) -> None:
    manifest = compile_llm(golden_llm.manifest, 64, (16,))
    try:
        with pytest.raises(BackendUnavailableError, match=words):
            open_backend(options.name, manifest, options=options)
    finally:
        uninstall()


def test_idle_threads_spin_for_a_moment_where_onnxruntime_can_end_it(golden_llm) -> None:
    allow, duration = "session.intra_op.allow_spinning", "session.intra_op.spin_duration_us"
    for version in ("1.19.2", "1.25.1"):
        assert spin_entries(version) == {allow: "0"}
    for version in ("1.26.0", "1.100.0", "2.0.0.dev3"):
        assert spin_entries(version) == {allow: "1", duration: "20"}
    backend, graph = OrtBackend(threads=2), golden_llm.manifest.graph("frame")
    with backend.open(graph.spec, golden_llm.manifest.path(graph.file)) as session:
        options = session._session.get_session_options()
        set_ = {e: options.get_session_config_entry(e) for e in spin_entries(onnxruntime.__version__)}
        assert set_ == spin_entries(onnxruntime.__version__)


def test_device_names_become_numbers(golden_llm) -> None:
    assert [device_number(d) for d in (None, "0", "3", "npu:1")] == [0, 0, 3, 1]


def test_auto_takes_the_first_that_can_run_and_says_why_not_the_others(golden_llm, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "acl", None)
    said: list[str] = []
    assert open_backend("auto", golden_llm.manifest, 1, report=said.append).name == "ort"
    assert [line.split(":")[1].strip() for line in said] == ["not om", "not torch-npu", "chose ort"]
    assert "set_env.sh" in said[0]
    assert "pip install torch-npu==" in said[1]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert open_backend("auto", golden_llm.manifest, 1, report=said.append).name == "torch cpu"


def test_auto_prefers_a_device_with_matching_files(golden_llm) -> None:
    manifest = compile_llm(golden_llm.manifest, 64, (16,))
    said: list[str] = []
    with installed():
        backend = open_backend("auto", manifest, report=said.append)
        assert said == ["backend auto: chose om (simulated)"]
        backend.close()  # type: ignore[attr-defined]
        om_device.shutdown()
    with installed(SimulatorConfig(soc="Ascend910B3")):
        assert open_backend("auto", manifest, report=said.append).name == "ort"
        assert "has no .om for Ascend910B3 (compiled: Ascend910B4)" in said[1]
        om_device.shutdown()


def test_auto_that_finds_nothing_lists_every_reason(golden_llm, monkeypatch) -> None:
    for module in ("acl", "torch", "onnxruntime"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailableError, match=r"om: .*torch-npu: .*ort: .*torch: "):
        open_backend("auto", golden_llm.manifest, report=lambda line: None)


def test_simulate_stands_in_for_the_device_that_was_compiled_for(golden_llm) -> None:
    manifest = compile_llm(golden_llm.manifest, 64, (16,), soc="Ascend310P3", cann="8.1.RC1")
    said: list[str] = []
    try:
        backend = open_backend("om", manifest, options=BackendOptions(simulate=True), report=said.append)
        assert said == ["simulated: Ascend310P3 with CANN 8.1.RC1, on the CPU; nothing here is a device result"]
        assert backend.name == "om (simulated)"
        backend.close()  # type: ignore[attr-defined]
        om_device.shutdown()
    finally:
        uninstall()


def test_simulate_without_fake_builds_says_how_to_make_them(golden_llm) -> None:
    with pytest.raises(BackendUnavailableError, match=r"tests\.fake_cann\.tree DIR"):
        open_backend("om", golden_llm.manifest, options=BackendOptions(simulate=True))
    assert "acl" not in sys.modules


# -- PyTorch on an NPU


class FakeNpu(types.SimpleNamespace):
    """What torch_npu adds to torch, as far as prepare_npu touches it."""


def fake_torch_npu(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> Any:
    import torch

    npu = FakeNpu(
        is_available=lambda: num_devices > 0,
        device_count=lambda: num_devices,
        set_device=lambda index: setattr(npu, "index", index),
        get_device_name=lambda index: "Ascend910B4",
        conv=types.SimpleNamespace(allow_hf32=True),
        matmul=types.SimpleNamespace(allow_hf32=True),
        aclnn=types.SimpleNamespace(allow_hf32=True),
        config=types.SimpleNamespace(allow_internal_format=True),
        set_compile_mode=lambda jit_compile: setattr(npu, "jit_compile", jit_compile),
        utils=types.SimpleNamespace(get_cann_version=lambda: "8.5.0"),
    )
    module = types.ModuleType("torch_npu")
    vars(module).update(__version__="2.13.0", npu=npu)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only: setattr(npu, "fixed", mode))
    monkeypatch.delenv("TORCH_NPU_FALLBACK_CPU_DISABLE", raising=False)
    return npu


def test_an_npu_is_set_up_for_float32_parity(golden_llm, monkeypatch) -> None:
    import os

    npu = fake_torch_npu(monkeypatch, num_devices=2)
    versions = prepare_npu("npu:1")
    assert str(versions).startswith("Ascend910B4, torch 2.13.0")
    assert "torch-npu 2.13.0, CANN 8.5.0" in str(versions)
    assert (npu.index, npu.jit_compile, npu.fixed) == (1, False, True)
    assert not any((npu.conv.allow_hf32, npu.matmul.allow_hf32, npu.aclnn.allow_hf32, npu.config.allow_internal_format))
    assert os.environ["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1"


def test_no_visible_npu_says_where_to_look(golden_llm, monkeypatch) -> None:
    fake_torch_npu(monkeypatch, num_devices=0)
    with pytest.raises(
        BackendUnavailableError, match=r"no NPU is visible: check npu-smi info.*ASCEND_RT_VISIBLE_DEVICES"
    ):
        prepare_npu("npu:0")
    fake_torch_npu(monkeypatch, num_devices=1)
    with pytest.raises(BackendUnavailableError, match="npu:4: this machine shows 1 NPUs"):
        prepare_npu("npu:4")


def test_without_torch_npu_the_message_names_the_release_for_this_torch(golden_llm, monkeypatch) -> None:
    import torch

    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    options = BackendOptions(device="npu:0")
    with pytest.raises(BackendUnavailableError, match=r"pip install torch-npu==2.8.0 \(it pairs with CANN 8.3.RC1\)"):
        open_backend("torch", golden_llm.manifest, options=options)


# -- ONNX Runtime with the CANN provider

SPEC = GraphSpec("g", (TensorSpec("x", "float32", ("B",)),), (TensorSpec("y", "float32", ("B",)),))
TWO_NODES = '<ir_version: 8, opset_import: ["": 17]> g (float[B] x) => (float[B] y) { z = Exp(x) y = Neg(z) }'


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TWO_NODES), str(tmp_path / "g.onnx"))
    return tmp_path / "g.onnx"


def test_without_the_provider_the_message_says_what_to_install(golden_llm) -> None:
    with pytest.raises(BackendUnavailableError, match=r"onnxruntime-cann 'numpy<2'"):
        open_backend("ort", golden_llm.manifest, options=BackendOptions(provider="cann"))


@pytest.fixture
def cann(monkeypatch: pytest.MonkeyPatch) -> CannBackend:
    providers = ["CANNExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    return CannBackend(threads=1)


def test_a_provider_that_is_dropped_is_an_error(golden_llm, cann: CannBackend, graph_file: Path) -> None:
    # This wheel has no CANN provider: onnxruntime drops it with a warning and would run everything on the CPU.
    with pytest.raises(BackendError, match=r"onnxruntime dropped CANNExecutionProvider|cannot load"):
        cann.open(SPEC, graph_file)


def test_nodes_left_to_the_cpu_are_counted_and_told(
    golden_llm, cann: CannBackend, graph_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cann.providers = ["CPUExecutionProvider"]  # the provider took nothing
    with cann.open(SPEC, graph_file) as session:
        for _ in range(2):
            np.testing.assert_allclose(session.run({"x": np.zeros(3, np.float32)})["y"], -1)
    placement = cann.placements["g"]
    assert placement.by_provider == {"CPUExecutionProvider": 2}
    assert placement.on_cpu == {"Exp": 1, "Neg": 1}
    assert "g: nodes run by CPUExecutionProvider 2; left to the CPU: Exp 1, Neg 1" in caplog.text


def test_a_profile_that_names_no_node_is_an_error(golden_llm, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"cat": "Session", "name": "model_run", "args": {}}]')
    with pytest.raises(BackendError, match="names no node"):
        read_placement("g", tmp_path / "p.json")
