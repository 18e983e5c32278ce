#!/usr/bin/env python3
"""Checks that every folder of concerto/ includes and links only what the table of docs/design.md, section 2, allows.

    check_layering.py               check the tree; one line a fault, exit code 1 if there is any
    check_layering.py --self-test   plant faults in a small tree and see that each is found

A room includes rooms of lower levels and itself; a subfolder (ops/ref) also includes its parent, never its siblings.
Tests and benches are leaves: they may also include their own level and the kernels. Nothing includes a test.
"""
import argparse
import re
import sys
import tempfile
from pathlib import Path

# Edges that the levels would allow and the design forbids.
FORBIDDEN = {("layers", "comm"), ("planner", "comm")}
# Subfolders that only these rooms may name: a backend enters at the root and is handed down.
KERNELS = {"ops/ref", "ops/cpu", "ops/cuda"}
KERNEL_USERS = {"cli"}
# Libraries that belong to one folder, so that a build without them needs no other file changed.
EXTERNAL = {
    "dnnl.h": {"ops/cpu"}, "dnnl.hpp": {"ops/cpu"}, "oneapi/dnnl/dnnl.hpp": {"ops/cpu"},
    "mpi.h": {"comm/mpi"}, "nccl.h": {"comm/nccl"},
    "cuda_runtime.h": {"ops/cuda", "comm/nccl"}, "cublasLt.h": {"ops/cuda"}, "cudnn.h": {"ops/cuda"},
}
# Seconds of compile time each: only in .cc files, never in a header that others include.
HEAVY = ("nlohmann/json.hpp", "yaml-cpp/", "spdlog/")

SUFFIXES = {".h", ".cc", ".cu", ".cpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
LIBRARY = re.compile(r"concerto_library\(\s*(\w+)(.*?)\)", re.S)


def read_levels(design):
    """{room: level} from the table `| level | folder | ...` of the design."""
    levels = {}
    for line in design.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\|\s*(\d+)\s*\|([^|]*)\|", line)
        if row:
            for room in re.findall(r"`(\w+)/`", row.group(2)):
                levels[room] = int(row.group(1))
    if len(levels) < 10 or levels.get("base") != 0:
        sys.exit(f"{design}: found no table of rooms (rows `| level | `folder/` | ...`)")
    return levels


def is_test(path):
    return path.name.endswith(("_test.cc", "_test.h")) or path.name.startswith("test_")


def place(path, levels):
    """(room, folder): for concerto/ops/ref/add.cc ("ops", "ops/ref"). Folder equals room when there is no subfolder."""
    parts = path.parts[1:-1]
    if not parts or parts[0] not in levels:
        return None, None
    return parts[0], "/".join(parts[:2])


def fault_of_edge(source, target, levels, source_is_test):
    """Why the folder `source` may not use the folder `target`, or None."""
    source_room, target_room = source.split("/")[0], target.split("/")[0]
    if source_is_test:
        if levels[target_room] > levels[source_room]:
            return f"a test of level {levels[source_room]} includes level {levels[target_room]}; put it in tests/"
        return None
    if source == target:
        return None
    if target in KERNELS and source_room not in KERNEL_USERS:
        return f"only cli, tests and benches may include {target}"
    if source_room == target_room:
        if source.startswith(target + "/"):
            return None
        return f"{source} may not include {target}: a subfolder includes its parent only"
    if (source_room, target_room) in FORBIDDEN:
        return f"the edge {source_room} -> {target_room} is forbidden"
    if levels[target_room] >= levels[source_room]:
        return f"level {levels[source_room]} may not include level {levels[target_room]}"
    return None


def check_file(path, root, levels):
    relative = path.relative_to(root)
    room, folder = place(relative, levels)
    if room is None:
        yield f"{relative}: lies in no room of the table in docs/design.md, section 2"
        return
    test = is_test(relative)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        include, where = found.group(1), f"{relative}:{number}"
        if include in EXTERNAL and folder not in EXTERNAL[include]:
            yield f"{where}: <{include}> belongs in {' or '.join(sorted(EXTERNAL[include]))}"
        if include.startswith(HEAVY) and path.suffix == ".h" and not test:
            yield f"{where}: <{include}> is slow to compile: include it in .cc files only"
        if not include.startswith("concerto/"):
            if '"' in line:
                yield f'{where}: write "concerto/room/file.h", from the root of the sources'
            continue
        target = Path(include)
        target_room, target_folder = place(target, levels)
        if target_room is None:
            yield f"{where}: {include} lies in no room of the table in docs/design.md, section 2"
        elif is_test(target) and not test:
            yield f"{where}: {include} belongs to the tests"
        else:
            fault = fault_of_edge(folder, target_folder, levels, test)
            if fault:
                yield f"{where}: {include}: {fault}"


def check_links(path, root, levels):
    """The same rule for `concerto_library(room ... DEPS concerto_other)`."""
    relative = path.relative_to(root)
    room, folder = place(relative, levels)
    if room is None:
        return
    names = {"concerto_" + name.replace("/", "_"): name for name in list(levels) + sorted(KERNELS)}
    text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
    for _, body in LIBRARY.findall(text):
        for word in body.partition("DEPS")[2].split():
            target = names.get(word)
            fault = target and fault_of_edge(folder, target, levels, False)
            if fault:
                yield f"{relative}: links {word}: {fault}"


def check(root):
    levels = read_levels(root / "docs/design.md")
    faults = []
    for path in sorted((root / "concerto").rglob("*")):
        if path.suffix in SUFFIXES:
            faults += check_file(path, root, levels)
        elif path.name == "CMakeLists.txt":
            faults += check_links(path, root, levels)
    return faults


def self_test(root):
    good = {
        "concerto/base/error.h": "#pragma once\n",
        "concerto/ops/add.h": '#pragma once\n#include "concerto/base/error.h"\n',
        "concerto/ops/ref/add.cc": '#include "concerto/ops/add.h"\n',
        "concerto/ops/cpu/add.cc": "#include <dnnl.hpp>\n",
        "concerto/ops/add_test.cc": '#include "concerto/ops/ref/add.h"\n#include "concerto/comm/group.h"\n',
        "concerto/cli/train.cc": '#include "concerto/ops/cpu/backend.h"\n#include <nlohmann/json.hpp>\n',
        "concerto/layers/CMakeLists.txt": "concerto_library(layers SOURCES a.cc DEPS concerto_ops)\n",
    }
    bad = [
        ("concerto/base/x.cc", '#include "concerto/ops/add.h"\n', "level 0 may not include level 2"),
        ("concerto/tensor/x.cc", '#include "concerto/config/run_config.h"\n', "level 1 may not include level 1"),
        ("concerto/layers/x.cc", '#include "concerto/comm/group.h"\n', "layers -> comm is forbidden"),
        ("concerto/planner/x.h", '  #  include "concerto/comm/group.h"\n', "planner -> comm is forbidden"),
        ("concerto/train/x.cc", '#include "concerto/ops/cpu/add.h"\n', "only cli, tests and benches"),
        ("concerto/ops/cpu/x.cc", '#include "concerto/ops/ref/add.h"\n', "only cli, tests and benches"),
        ("concerto/ops/x.cc", '#include "concerto/ops/ref/add.h"\n', "only cli, tests and benches"),
        ("concerto/comm/mpi/x.cc", '#include "concerto/comm/local/group.h"\n', "a subfolder includes its parent only"),
        ("concerto/ops/x.cc", "#include <dnnl.hpp>\n", "belongs in ops/cpu"),
        ("concerto/model/x.h", "#include <nlohmann/json.hpp>\n", ".cc files only"),
        ("concerto/model/x.cc", '#include "stage.h"\n', "from the root of the sources"),
        ("concerto/model/x.cc", '#include "concerto/ops/ops_test.h"\n', "belongs to the tests"),
        ("concerto/ops/x_test.cc", '#include "concerto/train/loop.h"\n', "put it in tests/"),
        ("concerto/helpers/x.cc", "", "lies in no room"),
        ("concerto/base/x.cc", '#include "concerto/helpers/x.h"\n', "lies in no room"),
        ("concerto/base/CMakeLists.txt", "concerto_library(base SOURCES a.cc DEPS concerto_ops)\n", "links concerto_ops"),
        ("concerto/model/CMakeLists.txt", "concerto_library(model DEPS concerto_ops_cpu)\n", "links concerto_ops_cpu"),
    ]

    def run(files):
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            files = {**files, "docs/design.md": (root / "docs/design.md").read_text(encoding="utf-8")}
            for name, text in files.items():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text(text, encoding="utf-8")
            return check(tree)

    wrong = [f"good tree: {fault}" for fault in run(good)]
    for name, text, expected in bad:
        faults = run({**good, name: text})
        if len(faults) != 1 or not faults[0].startswith(name) or expected not in faults[0]:
            wrong.append(f"{name}: {text.strip()!r}: wanted one fault with {expected!r}, got {faults}")
    return wrong, len(bad) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="check the checker")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if arguments.self_test:
        faults, cases = self_test(root)
    else:
        faults, cases = check(root), sum(p.suffix in SUFFIXES for p in (root / "concerto").rglob("*"))
    print("\n".join(faults) if faults else f"layering: {cases} {'cases' if arguments.self_test else 'files'}, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
