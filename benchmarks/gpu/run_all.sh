#!/usr/bin/env bash
# What needs a GPU, in named steps: the headline first, each under its limit, each result written when
# it is there. A step that would not fit into the time that is left is left out and named.
#
#   benchmarks/gpu/run_all.sh [--rehearse] [--out FOLDER] [--seconds N] [STEP ...]
#
# Steps: linear_logprob training_step extension weight_buckets tests doctor doctor_gpu (default: all,
# in this order, 570 seconds together). FOLDER is $OUT, else benchmarks/results/gpu. steps.txt has a
# line for each step: name, exit code, seconds. --rehearse needs no GPU: it collects what it would
# run, and runs the training step in a tiny shape.
#
# Needs python3 with torch >= 2.11, transformers, psutil, pytest, pytest-benchmark and pytest-timeout;
# the extension pybind11, cmake, ninja and nvcc; no network. Wheels in benchmarks/gpu/wheels (see fetch_peers.sh) are used.
set -uo pipefail
cd "$(dirname "$0")/../.."
ALL="linear_logprob training_step extension weight_buckets tests doctor doctor_gpu"
root="$PWD" rehearse="" results="${OUT:-benchmarks/results/gpu}" total=570 steps=""
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearse) rehearse=1 ;;
    --out) results="${2:?--out needs a folder}"; shift ;;
    --seconds) total="${2:?--seconds needs a number}"; shift ;;
    *) case " $ALL " in
         *" $1 "*) steps="$steps $1" ;;
         *) echo "unknown step $1: expected some of $ALL" >&2; exit 2 ;;
       esac ;;
  esac
  shift
done
steps="${steps:-$ALL}"
if [ -z "$rehearse" ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "no GPU: nvidia-smi lists none; nothing was built, measured or written" >&2
  exit 1
fi
mkdir -p "$results"
results="$(cd "$results" && pwd)"
: >"$results/steps.txt"
python="${PYTHON:-python3}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" CUBLAS_WORKSPACE_CONFIG=":4096:8"
build="$(mktemp -d "${TMPDIR:-/tmp}/lightrft-gpu-XXXXXX")"
trap 'rm -rf "$build"' EXIT
site="$build/site"
mkdir -p "$build/cmake" "$build/peers" "$site"
# A copy of the sources, with the extension beside them once it is built.
for package in kernels strategy engines trainer; do
  cp -r "packages/$package/src/lightrft" "$site/" || exit 1
done
for wheel in "$root"/benchmarks/gpu/wheels/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$build/peers"
done
export PYTHONPATH="$site:$build/peers${PYTHONPATH:+:$PYTHONPATH}"
# The project's own settings name plugins that this machine may lack.
printf '[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    gpu\n    multiprocess\n    triton\n    slow\n    shard\n' \
  >"$build/pytest.ini"

run_pytest() {
  "$python" -m pytest -c "$build/pytest.ini" --rootdir "$root" -p no:cacheprovider -q \
    ${rehearse:+--collect-only} "$@"
}

benchmark() {
  if [ -n "$rehearse" ]; then
    run_pytest "benchmarks/test_bench_$1.py"
    return
  fi
  run_pytest "benchmarks/test_bench_$1.py" -s --benchmark-json="$results/$1.json.part" \
    && mv "$results/$1.json.part" "$results/$1.json"
}

linear_logprob() { benchmark linear_logprob; }
weight_buckets() { benchmark weight_buckets; }
training_step() {
  "$python" benchmarks/gpu/training_step.py --out "$results/training_step.json" ${rehearse:+--rehearse}
}
extension() {
  [ -n "$rehearse" ] && { echo "not built: this is a rehearsal"; return; }
  local capability pybind
  capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)"
  pybind="$("$python" -m pybind11 --cmakedir)" || return
  cmake -G Ninja -S packages/kernels -B "$build/cmake" -DCMAKE_BUILD_TYPE=Release \
    -DLIGHTRFT_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${capability:-90}" -Dpybind11_DIR="$pybind" \
    -DPython_EXECUTABLE="$(command -v "$python")" && ninja -C "$build/cmake" \
    && cp "$build"/cmake/_native*.so "$site/lightrft/kernels/"
}
tests() {
  local parallel=""
  "$python" -c "import xdist" 2>/dev/null && parallel="-n 8"
  run_pytest tests/kernels -m gpu --maxfail=30 $parallel
}
doctor() { "$python" -m lightrft.cli.main doctor; }
doctor_gpu() {
  [ -n "$rehearse" ] && { echo "not asked: this is a rehearsal"; return; }
  "$python" -m lightrft.cli.main doctor --gpu
}

limit_of() {
  case "$1" in
    linear_logprob) echo 240 ;;
    training_step) echo 120 ;;
    extension) echo 100 ;;
    weight_buckets) echo 80 ;;
    tests) echo 200 ;;
    doctor) echo 150 ;;
    doctor_gpu) echo 150 ;;
  esac
}

export -f run_pytest benchmark $ALL
export python build root results rehearse site
failed=0
for name in $steps; do
  left=$((total - SECONDS))
  limit="$(limit_of "$name")"
  if [ "$left" -lt 20 ]; then
    echo "$name left out: $left of $total seconds are left" | tee -a "$results/steps.txt"
    continue
  fi
  [ "$left" -lt "$limit" ] && limit="$left"
  printf '\n=== %s (at most %ss, %ss gone)\n' "$name" "$limit" "$SECONDS"
  start="$SECONDS"
  timeout -k 5 "$limit" bash -c "$name" >"$results/$name.txt" 2>&1
  code=$?
  echo "$name $code $((SECONDS - start))" >>"$results/steps.txt"
  grep -E "^(NVIDIA|  )" "$results/$name.txt" | tail -n 40 || tail -n 20 "$results/$name.txt"
  # What is wrong with a machine explains its numbers; they are numbers all the same.
  case "$name" in doctor*) ;; *) [ "$code" -eq 0 ] || failed=1 ;; esac
done
printf '\n=== done\n'
cat "$results/steps.txt"
exit "$failed"
