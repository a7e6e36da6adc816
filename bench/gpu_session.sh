#!/usr/bin/env bash
# A part of a session on a machine with a GPU: bench/gpu_session.sh 1|2|3|4 [options of bench/gpu_check.py]
#   1  build the package where it has no kernels yet, and run the whole suite
#   2  time every operator beside its floor and its peers
#   3  compare candidates for the block sizes, and profile the calls
#   4  tune, run the suite and the timings with the tuned block sizes, and run the sanitizers
# A part takes 9 minutes at most. If a part is not done by then, the same command continues it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ! ${1:-} =~ ^[1-4]$ ]]; then
    echo "gpu_session: part: got '${1:-}', expected 1, 2, 3 or 4" >&2
    exit 2
fi
if [[ $1 == 1 ]] && ! compgen -G "cmab_kernels/_cuda*.so" > /dev/null; then
    CMAB_KERNELS_CUDA=1 python -m pip install --quiet --no-build-isolation --no-deps .
fi
exec python bench/gpu_check.py --part "$@"
