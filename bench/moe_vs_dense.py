#!/usr/bin/env python3
"""How many tokens does a MoE model need to reach the held-out loss of a dense model of the same FLOPs a token?

Trains a small dense model over N tokens and a MoE model of the same layers, width and attention over a share of them, each with its
own whole schedule on the same text. Both learning rates come from the same grid, on the first seed; then every seed trains with the best.
Writes OUT.md and OUT.svg. Exit code 0: the MoE's mean held-out loss is not above the dense model's.

    bench/prepare_small_vocabulary.sh FOLDER/text
    bench/moe_vs_dense.py --concerto build/release/bin/concerto --work FOLDER --out bench/results/moe_vs_dense

Finished runs in FOLDER are used again.
"""
import argparse
import json
import os
import statistics
import subprocess

from training_runs import COLOURS, SMALL_SHAPE, machine, small_text, svg, train

# So small that a pass over the text is hundreds of tokens for every parameter of the dense model's layers: more experts help
# where a model is short of parameters, not of tokens.
SHAPE = {**SMALL_SHAPE, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16}
# 166 is 3 experts of 48 and what the products of the router are worth, 21.3, rounded up: the dense model has a little more.
DENSE = {**SHAPE, "model_type": "ernie4_5", "intermediate_size": 166}
MOE = {**SHAPE, "model_type": "ernie4_5_moe", "intermediate_size": 166, "moe_num_experts": 64, "moe_k": 2,
       "moe_intermediate_size": 48, "moe_num_shared_experts": 1, "moe_layer_start_index": 0,
       "router_aux_loss_coef": 0.003, "moe_router_bias_update_rate": 1e-3}
BATCH, LENGTH = 8, 256


def make_config(args, kind):
    config = {
        "model": {"init": "random", **(DENSE if kind == "dense" else MOE)},
        "data": small_text(args.work),
        "training": {"steps": args.steps if kind == "dense" else round(args.steps * args.share), "global_batch_size": BATCH,
                     "micro_batch_size": BATCH, "seq_length": LENGTH, "dtype": "bf16", "eval_every_steps": args.steps // 10},
        "optimizer": {"min_lr": 0, "schedule": "cosine", "warmup_steps": 100},
        "checkpoint": {"every_steps": 0, "export_model": False}, "monitor": {"tensorboard": False}, "backend": "cpu"}
    if kind == "moe":
        config["training"]["balance_loss"] = "per_layer"
    return config


def measure_model(args, kind):
    """FLOPs a token of a training step, as `concerto bench step` counts them."""
    folder = os.path.join(args.work, f"shape_{kind}")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(DENSE if kind == "dense" else MOE, f)
    command = [args.concerto, "bench", "step", "--model", folder, "--batch", "1", "--seq", str(LENGTH), "--steps", "1", "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])["flops_per_token"]


def run(args, kind, lr, seed):
    folder = os.path.join(args.work, f"{kind}_{lr:g}_{seed}")
    steps, evals = train(args.concerto, folder, make_config(args, kind), {"optimizer.lr": lr, "run.seed": seed})
    load = f"  max/mean in the last step {steps[-1]['expert_max_over_mean']:.2f}" if kind == "moe" else ""
    print(f"{kind} lr {lr:g} seed {seed}: " + " ".join(f"{e['valid_loss']:.4f}" for e in evals) + load, flush=True)
    return steps, evals


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--concerto", default="build/release/bin/concerto")
    p.add_argument("--work", required=True, help="folder for the runs; its folder `text` holds the token files")
    p.add_argument("--out", default="bench/results/moe_vs_dense", help="written: OUT.md and OUT.svg")
    p.add_argument("--steps", type=int, default=4300, help="of the dense model")
    p.add_argument("--share", type=float, default=0.7, help="of the dense model's steps that the MoE gets")
    p.add_argument("--lrs", type=float, nargs="+", default=[16e-3, 8e-3, 32e-3])
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = p.parse_args()

    kinds = ("moe", "dense")
    flops = {kind: measure_model(args, kind) for kind in kinds}
    print(f"FLOPs a token: MoE {flops['moe']:.4g}, dense {flops['dense']:.4g}", flush=True)
    grid = {(kind, lr): run(args, kind, lr, args.seeds[0]) for lr in args.lrs for kind in kinds}
    final = {key: evals[-1]["valid_loss"] for key, (_, evals) in grid.items()}
    best = {kind: min(args.lrs, key=lambda lr: final[kind, lr]) for kind in kinds}
    runs = {(kind, seed): run(args, kind, best[kind], seed) for seed in args.seeds for kind in kinds}
    losses = {kind: [runs[kind, seed][1][-1]["valid_loss"] for seed in args.seeds] for kind in kinds}
    mean = {kind: statistics.mean(losses[kind]) for kind in kinds}
    noise = {kind: f"{statistics.stdev(losses[kind]):.4f}" if len(args.seeds) > 1 else "one seed" for kind in kinds}
    tokens = {kind: sum(r["tokens"] for r in runs[kind, args.seeds[0]][0]) for kind in kinds}
    reached = mean["moe"] <= mean["dense"]

    text = [f"""# Tokens that a MoE needs beside a dense model of the same FLOPs a token

    bench/prepare_small_vocabulary.sh FOLDER/text
    bench/moe_vs_dense.py --work FOLDER --steps {args.steps} --share {args.share:g} \\
        --lrs {" ".join(f"{lr:g}" for lr in args.lrs)} --seeds {" ".join(map(str, args.seeds))}

Text: the King James Bible and GCIDE in {SMALL_SHAPE["vocab_size"]} tokens; {BATCH} sequences of {LENGTH} a step; AdamW, cosine
schedule to 0, 100 warm-up steps, bf16. A seed gives the weights and the order of the text.
Machine: {machine()}.
""", "| | dense | MoE |", "|---|---|---|",
            f"| inner width | {DENSE['intermediate_size']} | top-{MOE['moe_k']} of {MOE['moe_num_experts']} experts of "
            f"{MOE['moe_intermediate_size']}, and a shared one |",
            f"| FLOPs a token | {flops['dense'] / 1e6:.3f} M | {flops['moe'] / 1e6:.3f} M |",
            f"| tokens | {tokens['dense'] / 1e6:.2f} M | {tokens['moe'] / 1e6:.2f} M ({tokens['moe'] / tokens['dense']:.2f} x) |"]
    whole = os.path.getsize(os.path.join(args.work, "text", "train.bin")) // 2  # two bytes a token
    text.append(f"| passes over the text | {tokens['dense'] / whole:.2f} | {tokens['moe'] / whole:.2f} |")
    for lr in sorted(args.lrs):
        text.append(f"| held-out loss, lr {lr:g}, seed {args.seeds[0]} | {final['dense', lr]:.4f} | {final['moe', lr]:.4f} |")
    for i, seed in enumerate(args.seeds):
        text.append(f"| held-out loss, best lr, seed {seed} | {losses['dense'][i]:.4f} | {losses['moe'][i]:.4f} |")
    text += [f"| **mean** (standard deviation) | **{mean['dense']:.4f}** ({noise['dense']}) | "
             f"**{mean['moe']:.4f}** ({noise['moe']}) |", "",
             f"The MoE {'reaches' if reached else 'does NOT reach'} the dense model's loss with {args.share:g} of its tokens: "
             f"{mean['moe'] - mean['dense']:+.4f}.", "", f"![held-out loss over tokens]({os.path.basename(args.out)}.svg)", ""]
    print("\n".join(text))
    with open(args.out + ".md", "w", encoding="utf-8") as f:
        f.write("\n".join(text))
    curves = []
    for colour, kind in zip(COLOURS, ("dense", "moe")):
        for seed in args.seeds:
            evals = runs[kind, seed][1]
            step_tokens = tokens[kind] / evals[-1]["step"]
            points = [(e["step"] * step_tokens / 1e6, e["valid_loss"]) for e in evals]
            curves.append(("MoE" if kind == "moe" else "dense", colour, False, points))
    ys = [y for curve in curves for _, y in curve[3]]
    with open(args.out + ".svg", "w", encoding="utf-8") as f:
        f.write(svg(curves, "million tokens", "held-out loss", min(ys), sorted(ys)[-len(curves)]))
    raise SystemExit(0 if reached else 1)


if __name__ == "__main__":
    main()
