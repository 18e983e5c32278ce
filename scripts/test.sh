#!/usr/bin/env bash
# Installs what the tests need, builds, and runs them. The first stage that fails ends the script and says how to run it alone.
#
#   scripts/test.sh         the fast tests (everything that has not the CTest label `slow`)
#   scripts/test.sh --all   also the slow tests, format, documents, a short training run, sanitizers and fuzz targets: what CI runs
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/stages.sh

all=
packages=--test
case ${1-} in
  '') ;;
  --all) all=1 packages=--all ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

use_ccache
tests=(ctest --no-tests=error --parallel "$(nproc)" --preset)

stage "packages" scripts/install_deps.sh "$packages"
stage "layering: the check finds planted faults" scripts/check_layering.py --self-test
stage "layering" scripts/check_layering.py
if [[ $all ]]; then
  stage "text" scripts/check_text.sh
  stage "format" scripts/check_format.sh
fi
stage "build release" scripts/build.sh release
stage "fast tests" "${tests[@]}" release -LE slow
if [[ $all ]]; then
  stage "slow tests" "${tests[@]}" release -L slow
  stage "documents" scripts/check_docs.py
  stage "short training run" scripts/check_run.sh
  stage "build asan" scripts/build.sh asan
  stage "tests under asan and ubsan" "${tests[@]}" asan -LE slow
  stage "build tsan" scripts/build.sh tsan
  stage "tests under tsan" "${tests[@]}" tsan -LE 'slow|differences'
  stage "build fuzz" scripts/build.sh fuzz safetensors_fuzz idx_fuzz jsonl_fuzz load_fuzz yaml_fuzz
  stage "fuzz targets" scripts/fuzz.sh 20
fi
stage_summary
