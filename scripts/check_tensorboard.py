#!/usr/bin/env python3
"""Compare a run's TensorBoard event files, as the real TensorBoard reads them, with its metrics.jsonl.

    pip install tensorboard
    scripts/check_tensorboard.py RUNDIR

Exit code 0: every training and evaluation row is there with its values, and nothing else; each histogram's counts have
the max over mean of its row, in whole tokens; each image is a whole PNG of the size that it claims.
Run by hand; the build's own test (concerto/train/tensorboard_test.cc) decodes the files without TensorBoard.
"""
import argparse
import json
import math
import pathlib
import struct
import sys
import zlib

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


BY_LAYER = {
    "expert_load": "expert_load/layer_{}",
    "expert_idle": "expert_idle/layer_{}",
    "expert_entropy": "expert_entropy/layer_{}",
    "expert_dropped": "expert_dropped/layer_{}",
}
HISTOGRAM_STEPS, IMAGE_STEPS = 10, 50  # as concerto/train/tensorboard.h


def png_fault(image):
    """What is wrong with a PNG file, or None. Python's zlib and its CRC judge ours."""
    data = image.encoded_image_string
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        return "is no PNG"
    at, packed, size, names = 8, b"", None, []
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        if zlib.crc32(name + body) != struct.unpack_from(">I", data, at + 8 + length)[0]:
            return f"check sum of {name}"
        names.append(name)
        size = struct.unpack_from(">II", body) if name == b"IHDR" else size
        packed += body if name == b"IDAT" else b""
        at += 12 + length
    if names[0] != b"IHDR" or names[-1] != b"IEND" or size != (image.width, image.height):
        return f"chunks {names}, size {size}, the event says {image.width} x {image.height}"
    if len(zlib.decompress(packed)) != size[1] * (size[0] + 1):
        return "pixels are missing"
    return None


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
        for name, tag in BY_LAYER.items():
            for layer, value in row.get(name, {}).items():
                expected[(tag.format(layer), row["step"])] = value
        for layer, (low, high) in row.get("expert_bias", {}).items():
            expected[(f"expert_bias_min/layer_{layer}", row["step"])] = low
            expected[(f"expert_bias_max/layer_{layer}", row["step"])] = high
        if "expert_load" in row:
            expected[("expert_load/max", row["step"])] = row["expert_max_over_mean"]
            expected[("train/aux_loss", row["step"])] = row["aux_loss"]
        for i, loss in enumerate(row.get("mtp_losses", [])):
            expected[(f"train/mtp_loss_{i}", row["step"])] = loss

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
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

    loads = {(tag, step): value for (tag, step), value in expected.items() if tag.startswith("expert_load/layer_")}
    layers = {tag for tag, _ in loads}
    steps = sorted({step for _, step in loads})
    histograms = set()
    for tag in tags["histograms"]:
        for event in events.Histograms(tag):
            histograms.add((tag, event.step))
            counts = event.histogram_value.bucket
            load = max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
            want = loads.get((tag.replace("expert_tokens", "expert_load"), event.step))
            if want is None or not close(load, want):
                faults.append(f"{tag} at step {event.step}: max over mean {load}, metrics.jsonl has {want}")
            if any(n != int(n) for n in counts):
                faults.append(f"{tag} at step {event.step}: counts that are no whole numbers")
    for step in steps:
        for tag in layers:
            tag = tag.replace("expert_load", "expert_tokens")
            if step % HISTOGRAM_STEPS == 0 and (tag, step) not in histograms:
                faults.append(f"{tag} at step {step}: missing")

    images = []
    for tag in tags["images"]:
        for image in events.Images(tag):
            images.append(image.step)
            fault = png_fault(image)
            if fault:
                faults.append(f"{tag} at step {image.step}: {fault}")
    faults += [f"heat map at step {step}: missing" for step in steps if step % IMAGE_STEPS == 0 and step not in images]

    for fault in faults[:20]:
        print(fault, file=sys.stderr)
    print(f"{len(seen)} scalars in {len(tags['scalars'])} tags, {len(histograms)} histograms, {len(images)} images, "
          f"{len(faults)} faults")
    return 1 if faults or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
