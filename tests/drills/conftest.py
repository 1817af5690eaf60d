from __future__ import annotations

from tests.serving.conftest import tiny_files, xla_cache  # noqa: F401
