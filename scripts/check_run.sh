#!/usr/bin/env bash
# A short training run from end to end with the built binary: the examples' settings are valid, the loss falls, and what a run leaves is whole.
#
#   scripts/check_run.sh [STEPS]
set -euo pipefail
cd "$(dirname "$0")/.."

steps=${1:-20}
concerto=build/release/bin/concerto
run=build/check_run
rm -rf "$run"

scripts/prepare_quickstart.sh
"$concerto" config check examples/quickstart.yaml
"$concerto" config check examples/dense.yaml
"$concerto" train examples/quickstart.yaml --run.dir="$run" --training.steps="$steps" --optimizer.warmup_steps=2 \
  --training.eval_batches=2 --monitor.trace_steps="[2, 3]"
python3 - "$run" "$steps" <<'END'
import json, sys
run, steps = sys.argv[1], int(sys.argv[2])
rows = [json.loads(line) for line in open(run + "/metrics.jsonl")]
losses = [row["loss"] for row in rows if "loss" in row]
valid = [row["valid_loss"] for row in rows if "valid_loss" in row]
assert len(losses) == steps, f"{len(losses)} training rows, wanted {steps}"
assert losses[-1] < losses[0] - 0.5, f"the loss did not fall: {losses[0]} -> {losses[-1]}"
assert valid and valid[-1] < losses[0], f"validation: {valid}"
for key in ("step", "total_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "expert_max_over_mean"):
    assert key in rows[0], f"metrics.jsonl has no {key}"
spans = {event["name"] for event in json.load(open(run + "/trace.json"))["traceEvents"]}
assert spans >= {"forward", "backward", "optimizer", "wait for data", "head"}, f"trace.json has {spans}"
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps, valid {valid[-1]:.3f}")
END
"$concerto" checkpoint verify "$run/latest"
"$concerto" generate --model "$run/model" --prompt "In the beginning" --max-tokens 8
"$concerto" train examples/sft.yaml --run.dir="$run/sft" --model.path="$run/model" --training.steps=6
echo "run: whole"
