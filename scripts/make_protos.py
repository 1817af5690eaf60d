"""Generates the Python modules of jaxserve/serving/protos.

    python -m venv /tmp/protos && /tmp/protos/bin/pip install grpcio-tools==1.71.2
    /tmp/protos/bin/python scripts/make_protos.py

The version of grpcio-tools decides which protobuf and grpcio can import the result: that version's and newer ones
(here protobuf 5.29 and grpcio 1.71), so it is an old one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "jaxserve.serving.protos"
PROTOS = Path(__file__).parent.parent.joinpath(*PACKAGE.split("."))
POOL_IMPORT = f"from {PACKAGE}.pool import POOL as _POOL"


def main() -> None:
    for folder in ("v1", "vllm"):
        sources = sorted((PROTOS / folder).glob("*.proto"))
        with tempfile.TemporaryDirectory() as out:
            subprocess.run(
                [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS / folder}", f"--python_out={out}",
                 f"--pyi_out={out}", f"--grpc_python_out={out}", *map(str, sources)], check=True)
            for path in sorted(Path(out).iterdir()):
                text = adapt(path.read_text(), folder)
                if path.name.endswith("_pb2_grpc.py") and "class " not in text:
                    continue  # a file without services
                (PROTOS / folder / path.name).write_text(text)


def adapt(text: str, folder: str) -> str:
    """protoc imports siblings as top-level modules and registers in the default pool; we do neither. Its stubs
    forget that booleans may be None, too."""
    text = text.replace(": bool = ...", ": _Optional[bool] = ...")
    text = re.sub(r"^import (\w+_pb2) as", rf"from {PACKAGE}.{folder} import \1 as", text, flags=re.MULTILINE)
    if "_descriptor_pool.Default()" in text:
        text = text.replace("_descriptor_pool.Default()", "_POOL")
        text = text.replace("from google.protobuf import descriptor_pool as _descriptor_pool", POOL_IMPORT)
    return text


if __name__ == "__main__":
    main()
