"""Pack the verdicts of the parser: python tests/data/readiness/make_verdicts.py GOLDEN_DIRECTORY."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

KEPT = ("verdict", "code", "message", "warnings", "ge_ops")


def main(golden: Path) -> None:
    hand = json.loads((golden / "hand_cases.json").read_text())
    node = json.loads((golden / "onnx_node_cases_opset17.json").read_text())
    meta = node.pop("_meta")
    packed = {
        "onnx": "1.23.2",
        "parser": hand.pop("_meta")["parser"],
        "scope": meta["scope"],
        "chosen": meta["cases"],
        "hand": {name: {k: case[k] for k in KEPT if k in case} for name, case in hand.items()},
        "node": {name: {k: case[k] for k in KEPT if k in case} for name, case in node.items()},
    }
    text = json.dumps(packed, separators=(",", ":"), sort_keys=True).encode()
    (Path(__file__).parent / "verdicts.json.gz").write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
