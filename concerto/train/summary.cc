#include "concerto/train/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string_view>

#include "concerto/train/human_units.h"

namespace concerto {

std::vector<RunSummary::Output> find_outputs(const std::string& run_dir) {
  namespace fs = std::filesystem;
  std::vector<RunSummary::Output> found;
  std::error_code ignored;
  const auto offer = [&](const std::string& name, std::string hint) {
    if (fs::exists(fs::path(run_dir) / name, ignored)) found.push_back({name, std::move(hint)});
  };
  offer("loss.svg", "the loss curve; any web browser opens it");
  offer("metrics.jsonl", "one JSON object a step");
  offer("expert_load.bin", fmt::format("the tokens of every expert; concerto inspect load {} draws them", run_dir));
  for (const auto& entry : fs::directory_iterator(run_dir, ignored)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
      found.push_back({"events.out.tfevents.*", "tensorboard --logdir " + shell_word(run_dir)});
      break;
    }
  }
  offer("trace.json", "a timeline of some steps; open it in https://ui.perfetto.dev");
  offer("latest", "the newest checkpoint; the same train command goes on from it");
  offer("model",
        "a Hugging Face folder; concerto generate --model " + shell_word(run_dir + "/model") + " --prompt ...");
  return found;
}

std::string format_summary(const RunSummary& s, const LossCurves& curves, int64_t columns, bool unicode) {
  std::string out;
  const auto row = [&](std::string_view name, const std::string& value) {
    fmt::format_to(std::back_inserter(out), "  {:<14}{}\n", name, value);
  };
  const bool done = s.step >= s.steps;
  std::string head = done ? fmt::format("Training done: {} steps", s.step)
                          : fmt::format("Training stopped at step {} of {}", s.step, s.steps);
  if (!s.stopped_by.empty()) head += fmt::format(" by {}", s.stopped_by);
  if (s.first_step > 1) head += fmt::format(", resumed at step {}", s.first_step);
  out += head + "\n";
  const std::string chart = loss_text(curves, std::min<int64_t>(columns, 72), 8, unicode);
  if (!chart.empty()) out += "\n" + chart + "\n";

  row("training loss", format_loss(s.final_loss));
  if (s.best_valid_loss)
    row("best valid", fmt::format("{} at step {}", format_loss(*s.best_valid_loss), s.best_valid_step));
  std::string tokens = format_count(static_cast<double>(s.tokens));
  if (s.train_seconds > 0)
    tokens += fmt::format(", {} a second", format_count(static_cast<double>(s.tokens) / s.train_seconds));
  row("tokens", tokens);
  row("time", fmt::format("{}, of it {} in steps", format_duration(s.seconds), format_duration(s.train_seconds)));
  if (s.memory.peak_bytes > 0) row("peak memory", format_memory_report(s.memory));
  if (s.skipped_steps > 0) row("skipped steps", fmt::format("{} with a bad loss", s.skipped_steps));
  if (s.outputs.empty()) return out;
  fmt::format_to(std::back_inserter(out), "\nIn {}:\n", s.run_dir);
  size_t width = 0;
  for (const auto& o : s.outputs) width = std::max(width, o.path.size());
  for (const auto& o : s.outputs) fmt::format_to(std::back_inserter(out), "  {:<{}}  {}\n", o.path, width, o.hint);
  return out;
}

}  // namespace concerto
