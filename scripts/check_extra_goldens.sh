#!/usr/bin/env bash
# Makes the cases of tests/golden/extra_cases.json (or of another table) with Hugging Face's transformers and compares
# Concerto with them on every backend, instruction set, schedule and kind of recompute. Run by hand: it needs a python
# with torch, transformers and safetensors.
#
#   scripts/check_extra_goldens.sh [TABLE.json]
#
# PYTHON and CONCERTO name other programs than python3 and build/release/bin/concerto; KEEP a folder to make the cases
# in, which are then not made again.
set -euo pipefail
cd "$(dirname "$0")/.."

table=${1:-tests/golden/extra_cases.json}
concerto=${CONCERTO:-build/release/bin/concerto}
cases=${KEEP:-$(mktemp -d)}
if [[ ! ${KEEP-} ]]; then trap 'rm -rf "$cases"' EXIT; fi
mkdir -p "$cases"

mapfile -t names < <("${PYTHON:-python3}" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$table")
for name in "${names[@]}"; do
  if [[ ! -f $cases/$name/case.json ]]; then
    PYTHONDONTWRITEBYTECODE=1 "${PYTHON:-python3}" tests/golden/make_golden.py "$cases" "$name" --table "$table"
  fi
done

levels=()
for level in generic avx2 avx512 avx512_bf16 amx; do
  if CONCERTO_ISA=$level "$concerto" verify --golden tests/golden/dense-tiny >/dev/null 2>&1; then levels+=("$level"); fi
done
echo "instruction sets here: ${levels[*]}"

failed=0
check() {  # ISA CASE OPTIONS...
  local level=$1 name=$2 output
  shift 2
  if ! output=$(CONCERTO_ISA=$level "$concerto" verify --golden "$cases/$name" "$@" 2>&1); then
    failed=$((failed + 1))
    printf 'FAIL %s %s %s\n%s\n' "$name" "$level" "$*" "$(tail -n 20 <<<"$output")"
  fi
}
for name in "${names[@]}"; do
  check "${levels[0]}" "$name" --backend ref
  check "${levels[0]}" "$name" --backend ref --schedule zero_bubble --recompute full
  for level in "${levels[@]}"; do
    check "$level" "$name" --threads 1
    check "$level" "$name" --schedule zero_bubble --recompute full --threads 2
    check "$level" "$name" --recompute selective --threads 3
  done
  echo "checked $name"
done
echo "${#names[@]} cases, $failed comparisons failed"
((failed == 0))
