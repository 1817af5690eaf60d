"""Serves a model: `python scripts/serve.py MODEL [options]` is `jaxserve serve MODEL [options]`, from a clone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve.cli.main import main  # noqa: E402

main(["serve", *sys.argv[1:]], prog_name="serve.py")
