"""The command as a whole: fast help, `python -m`, versions."""

import subprocess
import sys

from click.testing import CliRunner

from jaxserve.cli.main import main


def test_help_needs_no_heavy_import():
    code = ("import sys\n"
            "from jaxserve.cli.main import main\n"
            "main(['generate', '--help'], standalone_mode=False)\n"
            "print(sorted({'jax', 'transformers', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-model-len" in done.stdout
    assert done.stderr.strip() == "[]"


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "jaxserve", "--help"], capture_output=True, text=True, check=True)
    for command in ("generate", "chat", "bench", "info", "convert"):
        assert command in done.stdout


def test_an_unknown_option_is_a_usage_error():
    result = CliRunner().invoke(main, ["generate", "demo", "--no-such-option"])
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr
