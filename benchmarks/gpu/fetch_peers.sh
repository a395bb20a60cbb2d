#!/usr/bin/env bash
# Downloads peers, and what they import that a GPU machine may lack, into benchmarks/gpu/wheels
# (ignored by git: it has to be carried), for run_all.sh on a machine without a network. Needs a
# network and pip; installs nothing.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p wheels
for peer in "liger-kernel==0.8.5" "trl==1.16.0" "datasets==5.2.0" "dill==0.4.1" \
  "multiprocess==0.70.19"; do
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version "${PYTHON_VERSION:-3.12}" \
    --dest wheels "$peer" || echo "not to be had: $peer"
done
ls wheels
