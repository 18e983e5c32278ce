"""What the experiments of this folder share: run `concerto train`, read its metrics, draw curves."""
import json
import os
import shutil
import subprocess

# A decoder small enough for a million tokens to tell models apart; fields of a Hugging Face config.json.
SMALL_SHAPE = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
               "head_dim": 32, "max_position_embeddings": 2048, "rope_theta": 10000, "tie_word_embeddings": True}

COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b"]


def machine():
    """This machine in words: what the numbers may depend on."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        cpu = dict(line.split(":", 1) for line in f.read().replace("\t", "").splitlines() if ":" in line)
    names = {"avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    known = [name for flag, name in names.items() if flag in cpu["flags"].split()]
    return f"{os.cpu_count()} virtual CPUs of {cpu['model name'].strip()}, {', '.join(known) or 'no AVX-512'}"


def small_text(work):
    """The `data` section for what bench/prepare_small_vocabulary.sh has put into work/text."""
    text = os.path.join(work, "text")
    return {"train": f"{text}/train", "valid": f"{text}/valid", "tokenizer": f"{text}/tokenizer"}


def train(concerto, folder, config, settings, threads=2):
    """Trains, unless the same run is there already; gives the training rows and the evaluations of metrics.jsonl.

    config: the run's file as a dict. settings: {"section.key": value} that override it.
    """
    recipe = json.dumps({"config": config, "settings": settings}, sort_keys=True)
    recipe_file = folder + ".done.json"
    if not (os.path.exists(recipe_file) and open(recipe_file, encoding="utf-8").read() == recipe):
        shutil.rmtree(folder, ignore_errors=True)
        config_file = folder + ".json"
        with open(config_file, "w", encoding="utf-8") as f:
            json.dump(config, f)
        command = [concerto, "train", config_file, f"--run.dir={folder}", f"--run.threads={threads}"]
        subprocess.run(command + [f"--{key}={value}" for key, value in settings.items()], check=True, stdout=subprocess.DEVNULL)
        with open(recipe_file, "w", encoding="utf-8") as f:
            f.write(recipe)
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return [r for r in rows if "loss" in r], [r for r in rows if "valid_loss" in r]


def svg(curves, x_label, y_label, low, high, width=760, height=400):
    """curves: [(name, colour, dashed, [(x, y)...])]. y outside of [low, high] is cut; every name gets one line of the legend."""
    left, top, bottom = 48, 16, 40
    right_x = max(x for _, _, _, points in curves for x, _ in points)

    def place(x, y):
        y = min(max(y, low), high)
        return left + x / right_x * (width - left - 16), top + (high - y) / (high - low) * (height - top - bottom)

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = place(0, value)
        lines.append(f'<line x1="{left}" x2="{width - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        x, _ = place(right_x * i / 4, low)
        lines.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{right_x * i / 4:.3g}</text>')
    lines.append(f'<text x="{(left + width) / 2}" y="{height - 6}" text-anchor="middle">{x_label}</text>'
                 f'<text x="14" y="{height / 2}" text-anchor="middle" transform="rotate(-90 14 {height / 2})">{y_label}</text>')
    legend = {}
    for name, colour, dashed, points in curves:
        legend.setdefault(name, (colour, dashed))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
    for i, (name, (colour, dashed)) in enumerate(legend.items()):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        y = top + 16 + 18 * i
        lines.append(f'<line x1="{width - 250}" x2="{width - 222}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
                     f'<text x="{width - 216}" y="{y}">{name}</text>')
    return "\n".join(lines + ["</svg>"]) + "\n"
