"""What the README names exists."""

from __future__ import annotations

import re
from pathlib import Path

from jaxserve import LLM, EngineConfig
from jaxserve.cli.main import main


def test_everything_that_replaces_something_of_vllm_exists():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Coming from vLLM")[1].split("\n## ")[0]
    column = "\n".join(line.split("|")[2] for line in section.splitlines() if "|" in line)
    replacements = re.findall(r"`([^`]+)`", column)
    assert len(replacements) > 10
    for name in replacements:
        if name.startswith("jaxserve "):
            assert name.removeprefix("jaxserve ") in main.commands, name
        elif method := re.search(r"llm\.(\w+)", name):
            assert hasattr(LLM, method[1]), name
        elif not name.startswith(('"', "docs/", "error")):
            assert name.partition("=")[0] in EngineConfig.__dataclass_fields__, name
