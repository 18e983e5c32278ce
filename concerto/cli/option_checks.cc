#include "concerto/cli/option_checks.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <map>
#include <string>

#include "concerto/base/error.h"

namespace concerto {
namespace {

template <class T>
bool parse(const std::string& text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

CLI::Validator whole_number(int64_t low, int64_t high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        int64_t value = 0;
        if (parse(text, value) && value >= low && value <= high) return std::string();
        return fmt::format("{} is no whole number from {} to {}", text, low, high);
      },
      "");
}

CLI::Validator number(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double value = 0;
        if (parse(text, value) && value >= low && value <= high) return std::string();  // NaN is neither
        return fmt::format("{} is no number from {} to {}", text, low, high);
      },
      "");
}

CLI::Validator path_to_write() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() || text.ends_with('/') ? fmt::format("'{}' names no file", text) : std::string();
      },
      "");
}

CLI::Validator folder_to_write() {
  return CLI::Validator([](std::string& text) { return std::string(text.empty() ? "an empty name" : ""); }, "");
}

void add_recompute_option(CLI::App& command, Recompute& value) {
  const std::map<std::string, Recompute> names = {
      {"none", Recompute::kNone}, {"selective", Recompute::kSelective}, {"full", Recompute::kFull}};
  command.add_option("--recompute", value, "none | selective | full")
      ->transform(CLI::CheckedTransformer(names))
      ->default_str("none");
}

void add_thread_options(CLI::App& command, RunSection& run) {
  command
      .add_option("--threads", run.threads, "compute threads; 0: as many as --cores, else OMP_NUM_THREADS, else all")
      ->check(whole_number(0, kMostThreads));
  command.add_option("--cores", run.cores, "cores that the threads are pinned to, one each, as in 0-3,8")
      ->default_str("not pinned");
}

void check_micro_batch(const std::string& option, const ModelConfig& model, int64_t rows, int64_t seq_length) {
  const int64_t most = most_micro_batch_tokens(model);
  if (rows > most / seq_length)
    throw Error(ErrorCode::kUsage, option,
                fmt::format("{} sequences of {} tokens are more than the {} of a micro-batch", rows, seq_length, most),
                "Use less.");
}

}  // namespace concerto
