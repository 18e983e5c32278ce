# Shared by the other scripts (sourced, not run): named stages with their time, and a stop at the first that fails.
# shellcheck shell=bash

stage_names=()
stage_seconds=()
suite_start=$SECONDS

# Compilers are started through ccache where it is installed; a second clone in another folder finds the first one's results.
use_ccache() {
  command -v ccache >/dev/null || return 0
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
}

# stage NAME COMMAND...: runs the command. When it fails: says how to run it alone, and ends the script with its exit code.
stage() {
  local name=$1 start=$SECONDS code=0 command
  shift
  printf '\n=== %s\n' "$name"
  "$@" || code=$?
  local seconds=$((SECONDS - start))
  if ((code != 0)); then
    printf -v command ' %q' "$@"
    printf '\n=== %s: FAILED after %d s (exit code %d)\n    To run it alone:%s\n' "$name" "$seconds" "$code" "$command" >&2
    printf '%d passed, 1 failed\n' "${#stage_names[@]}"
    exit "$code"
  fi
  stage_names+=("$name")
  stage_seconds+=("$seconds")
  printf '=== %s: %d s\n' "$name" "$seconds"
}

# A line for each stage and their sum; the last line counts them.
stage_summary() {
  local i
  printf '\n%-44s %9s\n' "stage" "seconds"
  for i in "${!stage_names[@]}"; do printf '%-44s %9d\n' "${stage_names[i]}" "${stage_seconds[i]}"; done
  printf '%-44s %9d\n' "all" $((SECONDS - suite_start))
  printf '%d passed, 0 failed\n' "${#stage_names[@]}"
}
