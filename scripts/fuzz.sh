#!/usr/bin/env bash
# Runs every fuzz target of build/fuzz for some seconds each, from the seeds of tests/fuzz/make_seeds.py. A crash leaves its input in build/fuzz/crashes.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-20}
targets=("${@:2}")
if ((${#targets[@]} == 0)); then
  for path in build/fuzz/bin/*_fuzz; do
    [[ -x $path ]] && targets+=("$(basename "$path")")
  done
fi
if ((${#targets[@]} == 0)); then
  echo "fuzz: no targets in build/fuzz/bin. Run scripts/build.sh fuzz" >&2
  exit 1
fi
mkdir -p build/fuzz/crashes
tests/fuzz/make_seeds.py build/fuzz/seeds
for target in "${targets[@]}"; do
  corpus=build/fuzz/corpus/$target seeds=build/fuzz/seeds/$target
  mkdir -p "$corpus" "$seeds"
  echo "--- $target, $seconds s"
  log=build/fuzz/$target.log
  if ! "build/fuzz/bin/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=16384 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/crashes/$target-" "$corpus" "$seeds" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "fuzz: $target failed; its log is $log, its input in build/fuzz/crashes" >&2
    exit 1
  fi
  grep -E 'number_of_executed_units|new_units_added' "$log"
done
