#!/usr/bin/env python3
"""Two ranks of one thread beside one rank of two, the same step of moe-140m, and beside MPI's own exchange of the same bytes.

  bench/parallel_step.py [--concerto build/release/bin/concerto] [--rounds 2] [--steps 6]

Wants data/quickstart (scripts/prepare_quickstart.sh) and an idle machine. Layouts take turns; each figure is the best round's median step.
Prints a table: seconds a step, what a layout adds to the one rank, and for dp2, which exchanges every gradient and weight, the most that is
allowed: 1.25 x MPI's reduce-scatter + all-gather of as many bytes.
"""
import argparse, json, os, shutil, statistics, subprocess, tempfile

LAYOUTS = {"dp2": [], "ep2": ["--parallel.ep=2"], "tp2": ["--parallel.tp=2"]}


def step_seconds(concerto, folder, command, more, steps):
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([concerto, *command, "examples/quickstart.yaml", f"--run.dir={folder}", "--model.path=bench/shapes/moe-140m",
                    f"--training.steps={steps}", "--training.global_batch_size=4", "--training.micro_batch_size=2",
                    "--training.seq_length=512", "--training.eval_every_steps=0", "--data.valid=[]", "--optimizer.warmup_steps=1",
                    "--monitor.sample_prompt=", "--checkpoint.every_steps=0", "--checkpoint.export_model=false", "--monitor.trace_steps=[]",
                    *more], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in open(folder + "/metrics.jsonl")]
    return statistics.median(row["seconds"] for row in rows[2:]), rows[-1]["loss"]


def parameters():
    c = json.load(open("bench/shapes/moe-140m/config.json"))
    h, kv = c["hidden_size"], c["num_key_value_heads"] * (c["hidden_size"] // c["num_attention_heads"])
    attention, experts = 2 * h * h + 2 * h * kv + 2 * h, c["moe_num_experts"] + c["moe_num_shared_experts"]
    moe = 3 * h * c["moe_intermediate_size"] * experts + c["moe_num_experts"] * h
    dense = 3 * h * c["intermediate_size"]
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    layers = sum(attention + (moe if first <= i <= last else dense) for i in range(c["num_hidden_layers"]))
    return c["vocab_size"] * h + layers + h


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--concerto", default="build/release/bin/concerto")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["mpicc", "-O2", "bench/mpi_sync.c", "-o", work + "/mpi_sync"], check=True)
        best, losses = {}, {}
        for _ in range(a.rounds):
            runs = {"one rank, 2 threads": (["train"], ["--run.threads=2"])}
            for name, layout in LAYOUTS.items():
                runs[name] = (["launch", "-n", "2", "--threads"], ["--run.threads=1", *layout])
            for name, (command, more) in runs.items():
                seconds, losses[name] = step_seconds(a.concerto, work + "/run", command, more, a.steps)
                best[name] = min(best.get(name, 1e9), seconds)
        elements = parameters()
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpi = float(subprocess.run(["mpirun", *root, "--oversubscribe", "-n", "2", work + "/mpi_sync", str(elements)], check=True,
                                   capture_output=True, text=True).stdout)
    one = best["one rank, 2 threads"]
    print(f"{'layout':<22} {'s a step':>9} {'added':>9} {'allowed':>9}  loss")
    for name, seconds in best.items():
        added = "" if name.startswith("one") else f"{seconds - one:9.3f}"
        allowed = f"{1.25 * mpi:9.3f}" if name == "dp2" else ""
        print(f"{name:<22} {seconds:9.3f} {added:>9} {allowed:>9}  {losses[name]:.4f}")
    print(f"MPI reduce-scatter + all-gather of {4 * elements / 1e6:.0f} MB: {mpi:.3f} s")


if __name__ == "__main__":
    main()
