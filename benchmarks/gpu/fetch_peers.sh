#!/usr/bin/env bash
# Downloads peers that are pure Python into benchmarks/gpu/wheels (ignored by git), for run_all.sh on
# a machine without a network. Needs a network and pip; installs nothing. QuACK runs only where
# nvidia-cutlass-dsl is installed, too (it comes with `uv sync --extra vllm --group peers`).
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p wheels
for peer in "liger-kernel==0.8.5" "cut-cross-entropy==25.1.1" "trl==1.16.0" \
  "quack-kernels==0.6.5" "verl==0.9.1"; do
  python3 -m pip download --quiet --no-deps --only-binary :all: --dest wheels "$peer" \
    || echo "not to be had: $peer"
done
ls wheels
