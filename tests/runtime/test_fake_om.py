"""The container that stands in for an .om, and the manifest's record of a compiled graph."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from runtime.backends.fake_om import FakeOm, OmTensor, WeightsFile, is_fake_om, read_fake_om, write_fake_om
from runtime.errors import BackendError, ManifestError, SpecMismatchError
from runtime.manifest import OmBuild, sha256_of
from runtime.spec import GraphSpec, TensorSpec


def fake_om(directory: Path) -> FakeOm:
    weights = directory / "weights.bin"
    weights.write_bytes(b"1234")
    return FakeOm(
        graph_onnx=b"onnx",
        inputs=(OmTensor("x", "x", "float32", (1, 2)),),
        outputs=(OmTensor("/add/Add:0:y", "y", "float32", (1, 2)),),
        soc_version="Ascend910B3",
        cann_version="8.5.0",
        precision="origin",
        weights_directory=str(directory),
        weights=(WeightsFile("weights.bin", 4, sha256_of(weights)),),
        options={"framework": "5"},
        keep_dtype=("node",),
    )


def test_a_fake_om_is_read_as_it_was_written(tmp_path: Path) -> None:
    om = fake_om(tmp_path)
    write_fake_om(tmp_path / "a.om", om)
    assert is_fake_om(tmp_path / "a.om")
    assert read_fake_om(tmp_path / "a.om") == om
    read_fake_om(tmp_path / "a.om").check_weights()


def test_the_same_build_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.om", "b.om"):
        write_fake_om(tmp_path / name, fake_om(tmp_path))
    assert (tmp_path / "a.om").read_bytes() == (tmp_path / "b.om").read_bytes()


def test_changed_and_missing_weights_are_found(tmp_path: Path) -> None:
    om = fake_om(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"1235")
    with pytest.raises(BackendError, match="changed after"):
        om.check_weights()
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(BackendError, match="is missing"):
        om.check_weights()


@pytest.mark.parametrize("content", [b"", b"PICO real om bytes", None])
def test_a_real_or_damaged_om_is_no_fake_one(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.om"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("om.json", "[]")
            archive.writestr("graph.onnx", "")
    else:
        path.write_bytes(content)
    assert not is_fake_om(path)
    with pytest.raises(BackendError, match=r"no fake \.om|is damaged"):
        read_fake_om(path)


def om_build() -> OmBuild:
    return OmBuild(
        graph="prefill",
        axes={"B": 1, "T": 128},
        soc_version="Ascend910B3",
        cann="8.5.0",
        precision="origin",
        file="om/prefill.om",
        sha256="00",
        num_bytes=3,
        argv=("atc", "--framework=5"),
        inputs={"prefill.onnx": "11"},
        recipe="22",
        versions={"cann": "8.5.0"},
        log="om/prefill.log",
        seconds=1.5,
    )


def test_an_om_record_survives_json() -> None:
    assert OmBuild.from_dict(om_build().to_dict()) == om_build()


def test_an_om_record_without_bound_axes_is_refused() -> None:
    with pytest.raises(ManifestError, match="bound axes"):
        dataclasses.replace(om_build(), axes={"B": 0})


def test_an_om_record_binds_the_spec_of_its_graph() -> None:
    spec = GraphSpec("prefill", (TensorSpec("x", "int32", ("B", "T")),), (TensorSpec("y", "int32", ("B",)),))
    assert om_build().bound_spec(spec).inputs[0].bound_shape == (1, 128)
    with pytest.raises(SpecMismatchError, match="no axis named T"):
        om_build().bound_spec(GraphSpec("prefill", spec.outputs, (TensorSpec("z", "int32", ("B",)),)))
