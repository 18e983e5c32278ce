#!/usr/bin/env python3
"""Compare a run's TensorBoard event files, as the real TensorBoard reads them, with its metrics.jsonl.

    pip install tensorboard
    scripts/check_tensorboard.py RUNDIR

Exit code 0: every training and evaluation row is there with its values, and nothing else. Run by hand; the build's own
test (concerto/train/tensorboard_test.cc) decodes the files without TensorBoard.
"""
import argparse
import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCALARS = {
    "train/loss": "loss",
    "train/total_loss": "total_loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "train/tokens_per_s": "tokens_per_s",
}


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-37)  # TensorBoard's scalars are float32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=pathlib.Path)
    run_dir = parser.parse_args().run_dir

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    expected = {}
    for row in rows:
        if "valid_loss" in row:
            expected[("valid/loss", row["step"])] = row["valid_loss"]
            continue
        for tag, name in SCALARS.items():
            expected[(tag, row["step"])] = row[name]
        for layer, load in row.get("expert_load", {}).items():
            expected[(f"expert_load/layer_{layer}", row["step"])] = load
        if "expert_load" in row:
            expected[("expert_load/max", row["step"])] = row["expert_max_over_mean"]
            expected[("train/aux_loss", row["step"])] = row["aux_loss"]
        for i, loss in enumerate(row.get("mtp_losses", [])):
            expected[(f"train/mtp_loss_{i}", row["step"])] = loss

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    faults = []
    seen = set()
    for tag in tags["scalars"]:
        for event in events.Scalars(tag):
            key = (tag, event.step)
            want = expected.get(key)
            if key in seen:
                faults.append(f"{tag} at step {event.step}: twice")
            elif key not in expected:
                faults.append(f"{tag} at step {event.step}: not in metrics.jsonl")
            elif want is not None and not close(event.value, want):
                faults.append(f"{tag} at step {event.step}: {event.value}, metrics.jsonl has {want}")
            seen.add(key)
    faults += [f"{tag} at step {step}: missing" for tag, step in expected if (tag, step) not in seen]

    histograms = 0
    loads = {(tag, step): value for (tag, step), value in expected.items() if tag.startswith("expert_load/layer_")}
    for tag in tags["histograms"]:
        for event in events.Histograms(tag):
            histograms += 1
            counts = event.histogram_value.bucket
            load = max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
            want = loads.get((tag.replace("expert_tokens", "expert_load"), event.step))
            if want is None or not close(load, want):
                faults.append(f"{tag} at step {event.step}: max over mean {load}, metrics.jsonl has {want}")

    for fault in faults[:20]:
        print(fault, file=sys.stderr)
    print(f"{len(seen)} scalars in {len(tags['scalars'])} tags, {histograms} histograms, {len(faults)} faults")
    return 1 if faults or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
