#!/usr/bin/env bash
# All tests marked `gpu`, then the GPU benchmarks of benchmarks/claims.toml, on the machine's own
# python3: nothing is installed. Needs python >= 3.11, torch >= 2.11, safetensors, pytest, any cupy.
# Writes benchmarks/results/gpu-<card>.json.
#
#   scripts/gpu_check.sh               # from a bare checkout: the source folders go on PYTHONPATH
#   scripts/gpu_check.sh --installed   # on installed wheels: the packages must be in site-packages
#
# PYTHON names another interpreter; GPU_TESTS_LIMIT_S ends the tests of a package that hang.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
limit_s=${GPU_TESTS_LIMIT_S:-900}
installed=${1:-}

if [[ -n $installed && $installed != --installed ]]; then
  echo "gpu_check: unknown argument $installed; the only one is --installed" >&2
  exit 2
fi

gpu_test_files() {
  grep -rlE --include='test_*.py' 'mark\.gpu\b' "$1" | sort
}

if ! "$python" scripts/check_gpu.py; then
  {
    echo "gpu_check: nothing was run and no figure was taken; not run are the tests marked gpu in"
    for folder in packages/*/ testing/ integration_tests/; do
      gpu_test_files "$folder" || true
    done | sed 's/^/  /'
    echo "gpu_check: and the claims"
    "$python" scripts/run_claims.py --gpu --list | sed 's/^/  /'
  } >&2
  exit 1
fi

if [[ $installed == --installed ]]; then
  names=()
  for folder in packages/*/src/*/ testing/*/src/*/; do
    names+=("$(basename "$folder")")
  done
  # From an empty folder, so that nothing of the checkout can be imported instead of a wheel.
  check=$PWD/scripts/check_install.py
  empty=$(mktemp -d)
  (cd "$empty" && "$python" "$check" "${names[0]}" --siblings "${names[@]:1}")
  rmdir "$empty"
else
  for folder in "$PWD"/packages/*/src "$PWD"/testing/*/src; do
    PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
  done
  export PYTHONPATH
fi

# One process for each package: a process that has used CUDA cannot fork ranks that use it, and the
# tests of one package do one or the other. Only files that hold a GPU test: other test files may
# need libraries that are not here.
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0
sessions=()
for folder in packages/*/ testing/ integration_tests/; do
  mapfile -t files < <(gpu_test_files "$folder")
  [[ ${#files[@]} -gt 0 ]] || continue
  session=gpu-$(basename "$folder")
  sessions+=("$session")
  TEST_REPORT=$reports/$session.json timeout "$limit_s" "$python" -m pytest -q -rs -m gpu -p no:cacheprovider \
    "${files[@]}" || code=$?
  # 5: nothing was collected, because a library is missing; the summary names what was not run.
  [[ ${code:-0} -eq 0 || $code -eq 5 ]] || status=$code
  unset code
done
# No test that passed in all packages together is a failure too.
"$python" scripts/summary.py --reports "$reports" --not-run --together "$reports/gpu.json" \
  "${sessions[@]}" || status=1
if [[ -s $reports/gpu.json ]]; then
  "$python" scripts/run_claims.py --gpu --gpu-tests "$reports/gpu.json" || status=1
fi
exit "$status"
