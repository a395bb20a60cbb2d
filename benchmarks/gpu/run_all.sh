#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the extension, asks `lightrft doctor`, runs the
# gpu tests and both kernel benchmarks, writes results and a short table. Nine minutes, and those
# that starting vLLM takes where it is installed.
#
#   benchmarks/gpu/run_all.sh [RESULTS_FOLDER]      (default: $OUT, else benchmarks/results/gpu)
#
# Needs python3 with torch >= 2.11, pytest, pytest-benchmark, pybind11, cmake and ninja, and nvcc;
# no network. Wheels in benchmarks/gpu/wheels (see fetch_peers.sh) are unpacked and used if present.
set -uo pipefail
cd "$(dirname "$0")/../.."
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "no GPU: nvidia-smi lists none; nothing was built, measured or written" >&2
  exit 1
fi
root="$PWD"
results="${1:-${OUT:-benchmarks/results/gpu}}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" CUBLAS_WORKSPACE_CONFIG=":4096:8"
python="${PYTHON:-python3}"
failed=0

note() { printf '\n=== %s (%ss)\n' "$1" "$SECONDS"; }

note "extension"
build="${TMPDIR:-/tmp}/lightrft-gpu-build"
site="$build/site"
mkdir -p "$build/cmake" "$site"
# A copy of the sources with the extension beside them: the working tree stays as it is.
for package in kernels strategy engines trainer; do
  cp -r "packages/$package/src/lightrft" "$site/" || exit 1
done
capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)"
if pybind="$("$python" -m pybind11 --cmakedir 2>/dev/null)"; then
  cmake -G Ninja -S packages/kernels -B "$build/cmake" -DCMAKE_BUILD_TYPE=Release \
    -DLIGHTRFT_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${capability:-90}" -Dpybind11_DIR="$pybind" \
    -DPython_EXECUTABLE="$(command -v "$python")" >"$results/build.log" 2>&1 \
    && ninja -C "$build/cmake" >>"$results/build.log" 2>&1 \
    && cp "$build"/cmake/_native*.so "$site/lightrft/kernels/" \
    || { echo "the extension did not build; see build.log"; failed=1; }
else
  echo "pybind11 is missing: the extension is not built, torch serves the buckets"
  failed=1
fi
mkdir -p "$build/peers"
for wheel in "$root"/benchmarks/gpu/wheels/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$build/peers"
done
export PYTHONPATH="$site:$build/peers${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'PYTHON' || exit 1
import torch
from lightrft.kernels import capabilities
print(torch.__version__, capabilities())
assert torch.cuda.is_available(), "no GPU"
PYTHON

note "doctor"
# Its verdict is kept and the rest goes on: what is wrong with a machine explains slow results.
timeout 420 "$python" -m lightrft.cli.main doctor >"$results/doctor.txt" 2>&1 || failed=1
timeout 420 "$python" -m lightrft.cli.main doctor --gpu >>"$results/doctor.txt" 2>&1 || failed=1
cat "$results/doctor.txt"

# The project's own settings name plugins that this machine may lack.
cat >"$build/pytest.ini" <<'INI'
[pytest]
addopts = --import-mode=importlib
markers =
    gpu
    multiprocess
    triton
    slow
INI

note "peers"
# cutlass is what QuACK and the candidate in gpu/cute_forward.py are compiled by.
for peer in liger_kernel quack verl trl cut_cross_entropy cutlass; do
  "$python" -c "import $peer" >/dev/null 2>&1 && echo "$peer" || echo "$peer: absent"
done

note "gpu tests"
timeout 220 "$python" -m pytest -c "$build/pytest.ini" --rootdir "$root" tests/kernels -m gpu -q \
  -p no:cacheprovider --maxfail=30 \
  >"$results/tests.txt" 2>&1 || failed=1
tail -n 25 "$results/tests.txt"

run_benchmark() {
  note "$1"
  timeout "$2" "$python" -m pytest -c "$build/pytest.ini" --rootdir "$root" "benchmarks/test_bench_$1.py" -s -q -p no:cacheprovider \
    --benchmark-json="$results/$1.json" >"$results/$1.txt" 2>&1 || failed=1
  grep -E "^(NVIDIA|  )" "$results/$1.txt" || tail -n 20 "$results/$1.txt"
}
run_benchmark weight_buckets 80
run_benchmark linear_logprob 240

note "done"
exit "$failed"
