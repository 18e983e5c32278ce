#!/usr/bin/env python3
"""Checks that the documents tell the truth where a script can: generated pages are fresh, links lead somewhere, every error code is explained.

    check_docs.py [--binary build/release/bin/concerto] [--write]

--write renews docs/config.md instead of comparing it.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check_config(binary, write):
    """docs/config.md is what `concerto config help --markdown` prints."""
    page = ROOT / "docs/config.md"
    printed = subprocess.run([str(binary), "config", "help", "--markdown"], check=True, capture_output=True, text=True).stdout
    if write:
        page.write_text(printed, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != printed:
        yield "docs/config.md is stale: build, then run scripts/check_docs.py --write"


def check_links(pages):
    """Links to files of the repository exist. Web addresses and anchors inside a page are not looked up."""
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.split("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                yield f"{page.relative_to(ROOT)}: the link {target} leads nowhere"


def check_errors():
    """docs/errors.md has a heading for each value of ErrorCode, with its exit code."""
    header = (ROOT / "concerto/base/error.h").read_text(encoding="utf-8")
    body = re.search(r"enum class ErrorCode \{(.*?)\};", header, re.S).group(1)
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    for name, number in re.findall(r"k(\w+) = (\d+)", body):
        if not re.search(rf"^## {number} {name.lower()}\b", page, re.M | re.I):
            yield f"docs/errors.md: no heading '## {number} {name.lower()}'"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build/release/bin/concerto")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    pages = [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]
    faults = [*check_config(arguments.binary, arguments.write), *check_links(pages), *check_errors()]
    print("\n".join(faults) if faults else f"docs: {len(pages)} pages, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
