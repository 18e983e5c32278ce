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

# Start-up, and the whole of a run of one step with it: under 2 s, the step itself left out. The best of three: the machine has other work too.
python3 - "$concerto" "$run/one" <<'END'
import json, shutil, subprocess, sys, time
concerto, run = sys.argv[1:]
best = float("inf")
for _ in range(3):
    shutil.rmtree(run, ignore_errors=True)
    begin = time.monotonic()
    subprocess.run([concerto, "train", "examples/quickstart.yaml", "--run.dir=" + run, "--training.steps=1", "--training.eval_batches=1",
                    "--optimizer.warmup_steps=0", "--checkpoint.export_model=false"], check=True, stdout=subprocess.DEVNULL)
    step = json.loads(open(run + "/metrics.jsonl").readline())["seconds"]
    best = min(best, time.monotonic() - begin - step)
print(f"start-up, an evaluation and a checkpoint: {best:.2f} s")
assert best < 2, "start-up takes 2 s or more"
END

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
