#!/usr/bin/env bash
# Rates of the grouped products beside the probe's at the same shape, in one run: rounds of one and of the other take
# turns, the best of each counts. The probe (oneDNN, packed weights, one product) is asked for the whole matrix of rows
# and for one expert's mean share of it; the better of the two is the limit.
#
#   bench/grouped_vs_probe.sh BIN_DIR [--threads N] [--rounds R] [--seconds S] [--case rows,experts,n,k]...
#
# BIN_DIR has bench_op_products (ninja bench_op_products). Prints a line a (case, skew, product); exits 1 where a ratio is
# below the bar: 0.85 for even rows, 0.75 for Zipf(1.0). A weight gradient that is added to (later micro-batches of a
# step) reads and writes f32 sums, which the probe's product does not: it is shown, without a bar.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 1 ] || [ ! -x "$1/bench_op_products" ]; then
  echo "usage: $0 BIN_DIR [--threads N] [--rounds R] [--seconds S] [--case rows,experts,n,k]..." >&2
  echo "BIN_DIR wants bench_op_products: cmake --build BUILD --target bench_op_products" >&2
  exit 2
fi
bin=$1
shift
threads=$(nproc) rounds=3 seconds=0.3 cases=()
while [ $# -gt 0 ]; do
  case $1 in
    --threads) threads=$2 ;;
    --rounds) rounds=$2 ;;
    --seconds) seconds=$2 ;;
    --case) cases+=("$2") ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
if [ ${#cases[@]} -eq 0 ]; then
  cases=(49152,64,512,512 49152,64,512,256 16384,64,512,512 8192,16,1536,512 16384,8,1024,1024)
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
probe=${PROBE:-$work/probe}
[ -x "$probe" ] || "${CXX:-g++}" -O2 -std=c++20 -fopenmp "$here/probe.cpp" -o "$probe" -ldnnl

for ((round = 0; round < rounds; ++round)); do
  for c in "${cases[@]}"; do
    IFS=, read -r rows experts n k <<<"$c"
    share=$((rows / experts))
    for skew in '' ,zipf; do
      "$bin/bench_op_products" --threads "$threads" --seconds "$seconds" --grouped "$c$skew" |
        sed "s/^{/{\"case\": \"$c\", \"skew\": \"${skew:+zipf}\", /" >>"$work/own"
    done
    for shape in "$rows,$n,$k" "$share,$n,$k" "$rows,$k,$n" "$share,$k,$n" "$n,$k,$rows" "$n,$k,$share"; do
      "$probe" --threads "$threads" --seconds "$seconds" --shape "$shape" >>"$work/probe"
    done
  done
done

python3 - "$work/own" "$work/probe" <<'PY'
import collections, json, sys

own, probe = collections.defaultdict(float), collections.defaultdict(float)
for line in open(sys.argv[1]):
    r = json.loads(line)
    key = r["case"], r["skew"] or "even", r["op"].removeprefix("grouped_")
    own[key] = max(own[key], r["flops_per_s"])
for line in open(sys.argv[2]):
    r = json.loads(line)
    probe[r["shape"]] = max(probe[r["shape"]], r["flops_per_s"])
low = False
print(f"{'rows,experts,n,k':<22} {'skew':<5} {'product':<19} {'GFLOP/s':>8} {'probe':>8} {'ratio':>6}")
for (case, skew, op), rate in own.items():
    rows, experts, n, k = map(int, case.split(","))
    share = rows // experts
    shapes = {"forward": [(rows, n, k), (share, n, k)], "backward_input": [(rows, k, n), (share, k, n)],
              "backward_weight": [(n, k, rows), (n, k, share)]}[op.removesuffix("_add")]
    limit = max(probe[",".join(map(str, s))] for s in shapes)
    bar = 0 if op.endswith("_add") else 0.85 if skew == "even" else 0.75
    low |= rate < bar * limit
    print(f"{case:<22} {skew:<5} {op:<19} {rate / 1e9:8.1f} {limit / 1e9:8.1f} {rate / limit:6.2f}"
          + (f"  below {bar}" if rate < bar * limit else ""))
sys.exit(1 if low else 0)
PY
