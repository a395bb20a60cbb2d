#!/usr/bin/env bash
# The table of a GPU in one call, the headline first; docs/gpu.md says how to use a machine's minutes.
#
#   benchmarks/gpu/run_all.sh [--rehearse] [--call second] [--out FOLDER] [--seconds N] [STEP ...]
#
# FOLDER is $OUT, else benchmarks/results/gpu; table.jsonl, table.md and raw.tgz are written there, a
# line when its number is known. The limits of the steps add up to the seconds of the call (560, and
# 210 of the second one, which goes on where the first has prepared the machine). --rehearse needs no
# GPU: it runs every step of both calls in a tiny shape, with vLLM where it is installed.
#
# Needs python3 with torch >= 2.11, transformers, psutil and pytest; the extension pybind11, cmake,
# ninja and nvcc; no network. What git ignores must be carried along: .bundle/vllm.tar.xz (vLLM, where
# it is not installed) and benchmarks/gpu/wheels (peers: fetch_peers.sh).
set -uo pipefail
cd "$(dirname "$0")/../.."
rehearse="" results="${OUT:-benchmarks/results/gpu}" pass=()
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearse) rehearse=1; pass+=("$1") ;;
    --out) results="${2:?--out needs a folder}"; shift ;;
    *) pass+=("$1") ;;
  esac
  shift
done
if [ -z "$rehearse" ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "no GPU: nvidia-smi lists none; nothing was built, measured or written" >&2
  exit 1
fi
python="${PYTHON:-python3}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export CUBLAS_WORKSPACE_CONFIG=":4096:8" TOKENIZERS_PARALLELISM=false
export VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0
# The project's own settings name plugins that this machine may lack.
export PYTEST_ADDOPTS="-c benchmarks/gpu/pytest.ini --rootdir $PWD"
if [ -n "$rehearse" ]; then
  work="$(mktemp -d "${TMPDIR:-/tmp}/lightrft-gpu-XXXXXX")"
  trap 'rm -rf "$work"' EXIT
  # A busy CPU says nothing about limits of a GPU.
  PREPARE_SECONDS="${PREPARE_SECONDS:-600}"
else
  "$python" -c "import xdist" 2>/dev/null && PYTEST_ADDOPTS="$PYTEST_ADDOPTS -n 8"
  # The second call finds what the first has prepared.
  work="${TMPDIR:-/tmp}/lightrft-gpu"
fi
site="$work/site"
export PYTHONPATH="$site:$work/vllm:$work/peers${PYTHONPATH:+:$PYTHONPATH}"

extension() {
  local capability pybind
  capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)"
  pybind="$("$python" -m pybind11 --cmakedir)" || return
  cmake -G Ninja -S packages/kernels -B "$work/cmake" -DCMAKE_BUILD_TYPE=Release \
    -DLIGHTRFT_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${capability:-90}" -Dpybind11_DIR="$pybind" \
    -DPython_EXECUTABLE="$(command -v "$python")" && ninja -C "$work/cmake" \
    && cp "$work"/cmake/_native*.so "$site/lightrft/kernels/"
}
model() { # folder, arguments of init-model
  "$python" -m lightrft.cli.main init-model "$work/$1" "${@:2}"
}
prepare() {
  if [ -n "$rehearse" ]; then
    model 0.5b --lengths 16 &
    model 1.5b --preset tiny-llama --lengths 16
    wait
    return
  fi
  extension >"$work/raw/extension.txt" 2>&1 &
  local build=$!
  for wheel in benchmarks/gpu/wheels/*.whl; do
    [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$work/peers"
  done
  [ -e .bundle/vllm.tar.xz ] && tar -C "$work/vllm" -xJf .bundle/vllm.tar.xz
  # Every process of vLLM would compile three thousand files else.
  "$python" -m compileall -q -j 12 "$work/vllm" "$work/peers" "$site" >/dev/null 2>&1 &
  local compiled=$!
  model 0.5b --shape qwen2.5-0.5b --lengths 512
  model 1.5b --shape qwen2.5-1.5b --lengths 512
  wait "$compiled"
  wait "$build" || echo "the extension was not built: see raw/extension.txt"
  touch "$work/ready"
}

mkdir -p "$site" "$work/vllm" "$work/peers" "$work/raw" || exit 1
# Each time: a second call may bring other sources.
for package in kernels strategy engines trainer; do
  cp -r "packages/$package/src/lightrft" "$site/" || exit 1
done
export -f extension model prepare
export python work site rehearse
[ -e "$work/ready" ] || timeout -k 2 "${PREPARE_SECONDS:-75}" bash -c prepare 2>&1 | tail -n 5
echo "prepared in $SECONDS s"
"$python" benchmarks/gpu/steps.py --out "$results" --scratch "$work" --spent "$SECONDS" "${pass[@]}"
