"""Imports point one way, so that each layer can be read, tested and replaced without those above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path.relative_to(ROOT) for package in ("jaxserve", "kernels_pallas")
               for path in (ROOT / package).rglob("*.py"))

# Lower numbers may not import higher ones. A room is a package or a module.
LEVELS = {
    "kernels_pallas": 0,
    "jaxserve.layers": 1,
    "jaxserve.sampling": 2, "jaxserve.parallel": 2,
    "jaxserve.models": 3,
    "jaxserve.weights": 4, "jaxserve.tokenizer": 4, "jaxserve.text_length": 4,
    "jaxserve.runtime": 5,
    "jaxserve.engine": 6, "jaxserve.capacity": 6,
    "jaxserve.llm": 7, "jaxserve.offline": 7, "jaxserve.one_call": 7,
    "jaxserve": 8, "jaxserve.__main__": 9, "jaxserve.cli": 8, "jaxserve.bench": 8, "jaxserve.serving": 8,
    "jaxserve.client": 8,
}
# For everyone; they import nothing but each other. `request` and `results` are the seam between host and
# device: the plan of a step, and what it brought.
SHARED = {"jaxserve.config", "jaxserve.errors", "jaxserve.field_docs", "jaxserve.inputs", "jaxserve.json_files",
          "jaxserve.outputs", "jaxserve.sampling_params", "jaxserve.engine.request", "jaxserve.engine.results"}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    known = LEVELS.keys() | SHARED
    name = module
    while name not in known or (name == "jaxserve" and module != "jaxserve"):
        assert "." in name, f"{module} belongs to no room of LEVELS"
        name = name.rpartition(".")[0]
    return name


def imports(path: Path) -> set[str]:
    """Every module that the file imports, inside functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*module.split("."))).with_suffix(".py").exists() or (
                    ROOT / Path(*module.split("."))).is_dir()
                found.add(module if is_module else node.module)
    return found


def top_level(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: Path):
    here = room(module_name(path))
    for module in imports(path):
        if module.partition(".")[0] not in ("jaxserve", "kernels_pallas"):
            continue
        there = room(module)
        if there in SHARED or there == here:
            continue
        assert here not in SHARED, f"{path} is for everyone to import, but imports {module}"
        assert LEVELS[there] <= LEVELS[here], f"{path} ({here}) must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_imports_torch(path: Path):
    assert "torch" not in top_level(imports(path))


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[:2] == ("jaxserve", "engine")], ids=str)
def test_the_engine_is_host_code(path: Path):
    assert not top_level(imports(path)) & {"jax", "jaxlib", "flax"}


def test_kernels_stand_alone():
    for path in FILES:
        if path.parts[0] == "kernels_pallas":
            assert "jaxserve" not in top_level(imports(path)), path
