#!/bin/sh
# Everything that only a GPU can show, in one command: scripts/device_check.py says what. Needs jax with CUDA and
# jaxserve's dependencies, no package index and no weights; under six minutes on an H200.
#
#     scripts/device_check.sh [--seconds 330] [--json FILE]
#     scripts/device_check.sh --smoke     tiny sizes, on any machine: does the script itself work?
set -eu
cd "$(dirname "$0")/.."
PYTHONPATH=. exec "${PYTHON:-python3}" -m scripts.device_check "$@"
