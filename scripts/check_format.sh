#!/usr/bin/env bash
# Checks that the C++ sources are laid out as .clang-format says (version 14: others break lines elsewhere).
#
#   scripts/check_format.sh [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."

tool=
for name in clang-format-14 clang-format; do
  if command -v "$name" >/dev/null && [[ $("$name" --version) == *"version 14."* ]]; then tool=$name; break; fi
done
if [[ ! $tool ]]; then
  echo "check_format: needs clang-format 14. Run scripts/install_deps.sh --all" >&2
  exit 1
fi
mapfile -t files < <(git ls-files '*.cc' '*.h' '*.cpp' '*.cu' | while read -r file; do if [[ -f $file ]]; then echo "$file"; fi; done)
if ((${#files[@]} == 0)); then
  echo "check_format: git lists no sources here" >&2
  exit 1
fi
if [[ ${1-} == --fix ]]; then
  "$tool" -i "${files[@]}"
else
  wrong=()
  for file in "${files[@]}"; do
    "$tool" "$file" | cmp -s - "$file" || wrong+=("$file")
  done
  if ((${#wrong[@]})); then
    printf 'not formatted: %s\n' "${wrong[@]}" >&2
    echo "check_format: to mend: scripts/check_format.sh --fix" >&2
    exit 1
  fi
fi
echo "format: ${#files[@]} files"
