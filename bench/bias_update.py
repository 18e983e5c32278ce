#!/usr/bin/env python3
"""Does the update of the correction bias balance routers that start far off, and what does it cost in loss?

For every seed: draws the weights of a small model, multiplies two experts' rows of every router matrix, so that these two win
too often, and trains from there twice: with moe_router_bias_update_rate 1e-3 and without. No balance loss in either.
Writes OUT.md and OUT.svg: max/mean of the experts' tokens, summed over a window of 20 steps, in every layer.

    bench/prepare_small_vocabulary.sh FOLDER/text
    bench/bias_update.py --concerto build/release/bin/concerto --work FOLDER --out bench/results/bias_update

Finished runs in FOLDER are used again.
"""
import argparse
import array
import json
import math
import os
import statistics
import struct
import subprocess

from training_runs import COLOURS, SMALL_SHAPE, machine, small_text, svg, train

# As the quickstart's: three MoE layers, top-2 of 16 experts and a shared one.
MODEL = {**SMALL_SHAPE, "model_type": "ernie4_5_moe", "num_hidden_layers": 3, "intermediate_size": 304, "moe_num_experts": 16,
         "moe_k": 2, "moe_intermediate_size": 96, "moe_num_shared_experts": 1, "moe_layer_start_index": 0}

BATCH, LENGTH = 13, 256  # so that the window holds 64k tokens
WINDOW = 20  # steps
GOAL = 1.3


def scale_router_rows(path, factor, rows):
    """Multiplies the first rows of every router matrix in a safetensors file."""
    with open(path, "rb") as f:
        data = bytearray(f.read())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    routers = {name: entry for name, entry in header.items() if name.endswith(".mlp.gate.weight")}
    assert routers and all(entry["dtype"] == "F32" for entry in routers.values()), header.keys()
    for entry in routers.values():
        begin = 8 + size + entry["data_offsets"][0]
        end = begin + 4 * rows * entry["shape"][1]
        data[begin:end] = array.array("f", (factor * x for x in array.array("f", bytes(data[begin:end])))).tobytes()
    with open(path, "wb") as f:
        f.write(data)


def make_start(args, config, common, seed):
    """The folder of a model with drawn weights and uneven routers."""
    folder = os.path.join(args.work, f"start_{seed}")
    still = {"training.steps": 1, "optimizer.lr": 0, "optimizer.min_lr": 0, "optimizer.warmup_steps": 0}
    train(args.concerto, folder, config, {**common, **still, "run.seed": seed})
    model = os.path.join(folder, f"uneven_{args.factor:g}_{args.rows}")
    if not os.path.exists(model):
        subprocess.run(["cp", "-r", os.path.join(folder, "model"), model + ".new"], check=True)
        scale_router_rows(os.path.join(model + ".new", "model.safetensors"), args.factor, args.rows)
        os.rename(model + ".new", model)
    return model


def window_loads(args, folder, first, last):
    """{layer: max/mean of the experts' tokens summed over these steps}."""
    command = [args.concerto, "inspect", "load", folder, "--json", "--no-picture", "--steps", f"{first}-{last}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = {row["layer"]: row["tokens_per_expert"] for row in map(json.loads, out.splitlines()) if "layer" in row}
    return {layer: max(tokens) * len(tokens) / sum(tokens) for layer, tokens in counts.items()}


def head(args):
    return f"""# The update of the correction bias against routers that start far off

    bench/prepare_small_vocabulary.sh FOLDER/text
    bench/bias_update.py --work FOLDER --steps {args.steps} --factor {args.factor:g} --rows {args.rows} \\
        --lr {args.lr:g} --seeds {" ".join(map(str, args.seeds))}

A model of {MODEL["num_hidden_layers"]} layers, each with top-{MODEL["moe_k"]} of {MODEL["moe_num_experts"]} experts and a shared one,
hidden size {MODEL["hidden_size"]}. The King James Bible and GCIDE in {MODEL["vocab_size"]} tokens, {args.steps} steps of
{BATCH * LENGTH} tokens, AdamW, bf16, cosine schedule from {args.lr:g} to 0. In every layer the router rows of experts 0 to
{args.rows - 1} start {args.factor:g} times as large as drawn, so these win too often.
`moe_router_bias_update_rate` is 1e-3 (with) or 0 (without); neither has a balance loss.

A load is max/mean of the experts' tokens, summed over {WINDOW} steps ({WINDOW * BATCH * LENGTH} tokens); *start* is step 1 alone.
A seed gives the weights and the order of the text. Machine: {machine()}.
"""


def report(args, losses, loads, windows):
    """The page, and whether all is as wanted."""
    layers = sorted(loads[args.seeds[0], "with"][0])
    text = [head(args), "| seed | layer | start | with, last 20 steps | without, last 20 steps |", "|---|---|---|---|---|"]
    for seed in args.seeds:
        for layer in layers:
            start, balanced, uneven = loads[seed, "with"][0], loads[seed, "with"][-1], loads[seed, "without"][-1]
            text.append(f"| {seed} | {layer} | {start[layer]:.2f} | **{balanced[layer]:.2f}** | {uneven[layer]:.2f} |")

    text += ["", "| seed | held-out loss with | without | difference |", "|---|---|---|---|"]
    differences = [losses[seed, "with"] - losses[seed, "without"] for seed in args.seeds]
    for seed, difference in zip(args.seeds, differences):
        text.append(f"| {seed} | {losses[seed, 'with']:.4f} | {losses[seed, 'without']:.4f} | {difference:+.4f} |")

    lowest = min(min(loads[seed, "with"][0].values()) for seed in args.seeds)
    worst = max(max(loads[seed, "with"][-1].values()) for seed in args.seeds)
    mean = statistics.mean(differences)
    good = {"start": lowest > 3, "end": worst < GOAL, "loss": mean <= 0}
    say = {key: "yes" if value else "NO" for key, value in good.items()}
    text += ["", f"- Lowest load at the start {lowest:.2f}; above 3: {say['start']}.",
             f"- Highest load at the end, with the update, {worst:.2f}; below {GOAL}: {say['end']}.",
             f"- Held-out loss with the update minus without, mean over the seeds, {mean:+.4f}; no worse: {say['loss']}.", "",
             f"![max/mean of the worst layer over the steps]({os.path.basename(args.out)}.svg)", "",
             "Means over the seeds:", ""]
    columns = [(layer, name) for layer in layers for name in ("with", "without")]
    text += ["| steps | " + " | ".join(f"layer {layer}, {name}" for layer, name in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for i, (first, last) in enumerate(windows):
        means = [statistics.mean(loads[seed, name][i][layer] for seed in args.seeds) for layer, name in columns]
        text.append(f"| {first} to {last} | " + " | ".join(f"{value:.2f}" for value in means) + " |")
    return "\n".join(text) + "\n", all(good.values())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--concerto", default="build/release/bin/concerto")
    p.add_argument("--work", required=True, help="folder for the runs")
    p.add_argument("--out", default="bench/results/bias_update", help="written: OUT.md and OUT.svg")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--factor", type=float, default=8.0, help="of the first router rows")
    p.add_argument("--rows", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = p.parse_args()
    os.makedirs(args.work, exist_ok=True)

    config = {
        "model": {"init": "random", **MODEL}, "data": small_text(args.work),
        "training": {"steps": args.steps, "global_batch_size": BATCH, "micro_batch_size": BATCH, "seq_length": LENGTH,
                     "dtype": "bf16"},
        "optimizer": {"lr": args.lr, "min_lr": 0, "schedule": "cosine", "warmup_steps": 20},
        "checkpoint": {"every_steps": 0}, "monitor": {"tensorboard": False}, "backend": "cpu"}
    common = {"training.balance_loss": "none", "model.moe_router_bias_update_rate": 0}
    windows = [(1, 1)] + [(s - WINDOW + 1, s) for s in range(WINDOW, args.steps + 1, WINDOW)]
    losses, loads = {}, {}
    for seed in args.seeds:
        start = {**common, "run.seed": seed, "model.path": make_start(args, config, common, seed), "model.init": "pretrained"}
        for name, rate in (("with", 1e-3), ("without", 0)):
            folder = os.path.join(args.work, f"{name}_{seed}")
            _, evals = train(args.concerto, folder, config, {**start, "model.moe_router_bias_update_rate": rate})
            losses[seed, name] = evals[-1]["valid_loss"]
            loads[seed, name] = [window_loads(args, folder, first, last) for first, last in windows]
            worst = " ".join(f"{max(load.values()):.2f}" for load in loads[seed, name])
            print(f"seed {seed} {name}: {worst}  held-out loss {losses[seed, name]:.4f}", flush=True)

    text, good = report(args, losses, loads, windows)
    print(text)
    with open(args.out + ".md", "w", encoding="utf-8") as f:
        f.write(text)
    curves = []
    for colour, name in zip(COLOURS, ("with", "without")):
        for seed in args.seeds:
            points = [(last, max(load.values())) for (_, last), load in zip(windows, loads[seed, name])]
            curves.append((f"{name} the update", colour, name == "without", points))
    highest = max(y for curve in curves for _, y in curve[3])
    with open(args.out + ".svg", "w", encoding="utf-8") as f:
        f.write(svg(curves, "step", "max/mean, worst layer", 1, 1 + 4 * math.ceil((highest - 1) / 4)))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
