"""What tools do to a published package, each on a copy of one: a function from ONNX model to ONNX model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

Change = Callable[[ModelProto], ModelProto | None]


def mutated(package: Path, target: Path, change: Change, graphs: str = "*.onnx") -> Path:
    """A copy of a package whose matching graphs went through `change`; each has its own data file then."""
    shutil.copytree(package, target)
    paths = sorted(target.glob(f"*/{graphs}"))
    assert paths
    for path in paths:
        model = onnx.load(path)
        model = change(model) or model
        path.unlink()
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=256)
    return target


def renamed(model: ModelProto) -> None:
    """Every value and initializer gets a number, nodes lose their names."""
    keep = {i.name for i in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if name in keep or not name else names.setdefault(name, f"v{len(names)}")

    for tensor in model.graph.initializer:
        tensor.name = new(tensor.name)
    for node in model.graph.node:
        node.name = ""
        node.input[:] = [new(i) for i in node.input]
        node.output[:] = [new(o) for o in node.output]
    del model.graph.value_info[:]


def simplified(model: ModelProto) -> ModelProto:
    import onnxsim

    result, held = onnxsim.simplify(model)
    assert held
    return result


def ort_basic(model: ModelProto) -> ModelProto:
    return _optimized(model, "ORT_ENABLE_BASIC")


def ort_extended(model: ModelProto) -> ModelProto:
    return _optimized(model, "ORT_ENABLE_EXTENDED")


def _optimized(model: ModelProto, level: str) -> ModelProto:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as scratch:
        options.optimized_model_filepath = f"{scratch}/optimized.onnx"
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def half(model: ModelProto) -> ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(model, keep_io_types=True)


def dynamic_int8(model: ModelProto) -> ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch:
        quantize_dynamic(model, f"{scratch}/quantized.onnx")
        return onnx.load(f"{scratch}/quantized.onnx")


def weight_only_int8(model: ModelProto) -> None:
    """Matrices of MatMul become int8 with one scale per output, behind DequantizeLinear."""
    stored = {t.name: t for t in model.graph.initializer}
    alias = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity"}  # of shared tensors
    nodes: list[NodeProto] = []
    done: dict[str, str] = {}
    for node in model.graph.node:
        node.input[:] = [alias[i] if alias.get(i) in stored else i for i in node.input]
        name = node.input[1] if node.op_type == "MatMul" else ""
        if name in stored and len(stored[name].dims) == 2:
            if name not in done:
                done[name] = f"{name}_wide"
                weight = numpy_helper.to_array(stored[name])
                scale = np.abs(weight).max(0) / np.float32(127)
                parts = {"int8": np.rint(weight / scale).astype(np.int8), "scale": scale}
                for part, array in parts.items():
                    model.graph.initializer.append(numpy_helper.from_array(array, f"{name}_{part}"))
                operands = [f"{name}_int8", f"{name}_scale"]
                nodes.append(helper.make_node("DequantizeLinear", operands, [done[name]], axis=1))
            node.input[1] = done[name]
    rest = [node for node in model.graph.node if alias.get(node.output[0]) not in stored]
    _replace_nodes(model.graph, [*nodes, *rest])


def deduplicated(model: ModelProto) -> None:
    """Equal tensors are stored once; the transpose of a tensor becomes a Transpose of it."""
    seen: dict[tuple[tuple[int, ...], bytes], str] = {}
    rename: dict[str, str] = {}
    nodes = []
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        turned = (array.T.shape, array.T.tobytes())
        if (array.shape, array.tobytes()) in seen:
            rename[tensor.name] = seen[array.shape, array.tobytes()]
        elif array.ndim == 2 and turned in seen:
            nodes.append(helper.make_node("Transpose", [seen[turned]], [tensor.name], perm=[1, 0]))
        else:
            seen[array.shape, array.tobytes()] = tensor.name
    for node in model.graph.node:
        node.input[:] = [rename.get(i, i) for i in node.input]
    _replace_nodes(model.graph, [*nodes, *model.graph.node])


def rewritten(model: ModelProto) -> None:
    """LayerNorm in single steps, q, k and v as three layers, NaN masked behind Softmax, layer scale in the weight."""
    graph = model.graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    maker = {o: n for n in graph.node for o in n.output}
    nodes: list[NodeProto] = []
    new: dict[str, np.ndarray] = {}
    for i, node in enumerate(graph.node):
        if node.op_type == "LayerNormalization":
            nodes += _norm_steps(node, f"norm{i}", new)
        elif node.op_type == "Softmax" and "Softmax" in node.name:
            inner, nan, zero = f"softmax{i}", f"nan{i}", f"zero{i}"
            new[zero] = np.zeros((), np.float32)
            nodes += [
                helper.make_node("Softmax", node.input, [inner], axis=-1),
                helper.make_node("IsNaN", [inner], [nan]),
                helper.make_node("Where", [nan, zero, inner], node.output),
            ]
        elif node.op_type == "Split" and _is_joined_linear(maker.get(node.input[0]), maker, stored):
            nodes += _three_linears(node, f"split{i}", maker, stored, new)
        elif node.op_type == "Mul" and node.input[0] in stored and _is_matmul(maker.get(node.input[1]), stored):
            product = maker[node.input[1]]
            new[f"scaled{i}"] = stored[product.input[1]] * stored[node.input[0]]
            nodes.append(helper.make_node("MatMul", [product.input[0], f"scaled{i}"], node.output))
        else:
            nodes.append(node)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in new.items())
    _replace_nodes(graph, nodes)


def _is_matmul(node: NodeProto | None, stored: dict[str, np.ndarray]) -> bool:
    return node is not None and node.op_type == "MatMul" and node.input[1] in stored


def _is_joined_linear(node: NodeProto | None, maker: dict[str, NodeProto], stored: dict[str, np.ndarray]) -> bool:
    if node is None or node.op_type != "Add":
        return False
    return node.input[0] in stored and _is_matmul(maker.get(node.input[1]), stored)


def _three_linears(
    node: NodeProto, name: str, maker: dict[str, NodeProto], stored: dict[str, np.ndarray], new: dict[str, np.ndarray]
) -> list[NodeProto]:
    add = maker[node.input[0]]
    product = maker[add.input[1]]
    nodes = []
    weights = np.split(stored[product.input[1]], 3, 1)
    biases = np.split(stored[add.input[0]], 3)
    for j, output in reversed(list(enumerate(node.output))):
        new[f"{name}_w{j}"], new[f"{name}_b{j}"] = weights[j], biases[j]
        nodes.append(helper.make_node("MatMul", [product.input[0], f"{name}_w{j}"], [f"{name}_p{j}"]))
        nodes.append(helper.make_node("Add", [f"{name}_p{j}", f"{name}_b{j}"], [output]))
    return nodes


def _norm_steps(node: NodeProto, name: str, new: dict[str, np.ndarray]) -> list[NodeProto]:
    epsilon = next(a.f for a in node.attribute if a.name == "epsilon")
    new[f"{name}_eps"], new[f"{name}_two"] = np.float32(epsilon), np.float32(2)
    steps = [
        ("ReduceMean", [node.input[0]], "mean", {"axes": [-1]}), ("Sub", [node.input[0], "mean"], "centred", {}),
        ("Pow", ["centred", "two"], "square", {}), ("ReduceMean", ["square"], "variance", {"axes": [-1]}),
        ("Add", ["variance", "eps"], "shifted", {}), ("Sqrt", ["shifted"], "root", {}),
        ("Div", ["centred", "root"], "normal", {}), ("Mul", ["normal", node.input[1]], "scaled", {}),
        ("Add", ["scaled", node.input[2]], node.output[0], {}),
    ]  # fmt: skip
    own = {"mean", "centred", "square", "variance", "shifted", "root", "normal", "scaled", "eps", "two"}

    def full(value: str) -> str:
        return f"{name}_{value}" if value in own else value

    return [helper.make_node(op, list(map(full, inputs)), [full(out)], **a) for op, inputs, out, a in steps]


def _replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Give a graph these nodes; initializers that no node reads, or that a node makes now, go."""
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    read, made = ({v for node in kept for v in side(node)} for side in (lambda n: n.input, lambda n: n.output))
    for tensor in [t for t in graph.initializer if t.name not in read or t.name in made]:
        graph.initializer.remove(tensor)
