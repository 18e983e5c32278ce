// Checks of option values whose refusals read as the rest of our errors do.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <string>

#include "concerto/config/run_config.h"

namespace concerto {

constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostTokens = int64_t{1} << 30;  // of a sequence, a prompt, a micro-batch

CLI::Validator whole_number(int64_t low, int64_t high);  // low <= x <= high, in decimal digits
CLI::Validator number(double low, double high);          // finite, low <= x <= high
CLI::Validator path_to_write();                          // names something: neither empty nor ending in '/'
CLI::Validator folder_to_write();                        // not empty
// --recompute: none | selective | full.
void add_recompute_option(CLI::App& command, Recompute& value);
// --threads and --cores: into the section that a config has them in; pinned_cores reads it.
void add_thread_options(CLI::App& command, RunSection& run);
// Error(kUsage) where a micro-batch of `rows` sequences has more tokens than the kernels can number.
void check_micro_batch(const std::string& option, const ModelConfig& model, int64_t rows, int64_t seq_length);

}  // namespace concerto
