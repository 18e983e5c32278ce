// For tests: a command called as from a shell.
#pragma once

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace concerto {

// Runs `concerto ARGUMENTS...` with the commands that `add` adds, and returns what it printed.
inline std::string run_command(void (*add)(CLI::App&), std::vector<std::string> arguments) {
  CLI::App app;
  add(app);
  std::reverse(arguments.begin(), arguments.end());
  testing::internal::CaptureStdout();
  try {
    app.parse(arguments);
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  std::fflush(stdout);
  return testing::internal::GetCapturedStdout();
}

}  // namespace concerto
