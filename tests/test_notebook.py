"""The quickstart notebook runs from top to bottom and shows what its text promises."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"


def printed(cell) -> str:
    return "".join(output["text"] for output in cell.get("outputs", ())
                   if output["output_type"] == "stream" and output["name"] == "stdout")



@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    return notebook


def cell_with(notebook, text: str):
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
    return cell


def test_the_committed_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_chat_answers_the_question(executed):
    assert "Paris" in printed(cell_with(executed, "capital of France"))


def test_every_prompt_is_continued(executed):
    text = printed(cell_with(executed, "for prompt, output in zip"))
    assert len(re.findall(r"\[(?:length|stop)\]", text)) == 3


def test_the_stream_prints_text(executed):
    assert printed(cell_with(executed, "llm.stream")).strip()


def test_the_second_question_hits_the_prefix_cache(executed):
    first, second = re.findall(r"(\d+) of (\d+) prompt tokens", printed(cell_with(executed, "num_cached_tokens")))
    assert int(first[0]) == 0
    assert int(second[0]) > 0.7 * int(second[1])
