#!/usr/bin/env bash
# Configures and builds a preset (release, debug, asan, tsan, fuzz) into build/PRESET.
#
#   scripts/build.sh [PRESET [TARGET...]]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/stages.sh

preset=${1:-release}
targets=("${@:2}")
use_ccache
cmake --preset "$preset"
cmake --build --preset "$preset" ${targets[@]:+--target "${targets[@]}"}
