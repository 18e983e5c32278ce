// What showing a step costs: processor time a step of summarising the expert loads, and of writing metrics.jsonl,
// expert_load.bin and TensorBoard events (their histograms and heat maps among them), as JSON lines.
//
//   bench_monitor_step [DIR [STEPS]]      DIR (default: the temporary folder) receives the files
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "concerto/base/rng.h"
#include "concerto/train/load_file.h"
#include "concerto/train/tensorboard.h"

using namespace concerto;

namespace {

double processor_seconds() {
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Part {
  const char* name;
  double seconds = 0;
};

template <class F>
void timed(Part& part, F&& f) {
  const double begin = processor_seconds();
  f();
  part.seconds += processor_seconds() - begin;
}

void run(const std::string& dir, int64_t layers, int64_t experts, int64_t k, int64_t tokens, int64_t steps) {
  std::filesystem::create_directories(dir);
  LoadHead head{.layers = {}, .experts = experts};
  StepReport r;
  r.steps = steps;
  r.loss = 1.0 / 3.0;
  for (int64_t l = 0; l < layers; ++l) {
    head.layers.push_back(l + 1);
    r.tokens_per_expert.emplace_back(static_cast<size_t>(experts), 0);
  }
  r.moe_layers = head.layers;
  const Rng rng(1, "loads");
  uint64_t at = 0;
  MetricsWriter metrics(dir + "/metrics.jsonl", 0);
  EventWriter events(dir, 0);
  LoadWriter loads(dir + "/" + kLoadFileName, head, 0);
  LoadWatch watch({.experts_per_token = k});
  Part parts[] = {{"summary_us"}, {"metrics_us"}, {"load_file_us"}, {"tensorboard_us"}, {"warnings_us"}};
  double total = 0;
  for (r.step = 1; r.step <= steps; ++r.step) {
    for (auto& layer : r.tokens_per_expert)
      for (int64_t& n : layer)
        n = static_cast<int64_t>(rng.below(at++, static_cast<uint64_t>(2 * tokens * k / experts)));
    timed(parts[0], [&] { summarize_loads(r); });
    timed(parts[1], [&] { metrics.write(r); });
    timed(parts[2], [&] { loads.write(r); });
    timed(parts[3], [&] { events.write(r); });
    timed(parts[4], [&] { watch.step(r.step, r.moe_layers, r.tokens_per_expert, r.layer_loads); });
  }
  std::printf("{\"moe_layers\": %ld, \"experts\": %ld", static_cast<long>(layers), static_cast<long>(experts));
  for (const Part& p : parts) {
    std::printf(", \"%s\": %.1f", p.name, 1e6 * p.seconds / static_cast<double>(steps));
    total += p.seconds;
  }
  std::printf(", \"total_us\": %.1f, \"load_file_bytes_a_step\": %.0f}\n", 1e6 * total / static_cast<double>(steps),
              static_cast<double>(std::filesystem::file_size(dir + "/" + kLoadFileName)) / static_cast<double>(steps));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string dir = argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string();
  std::string own = dir + "/monitor-step-XXXXXX";
  if (::mkdtemp(own.data()) == nullptr) return 1;
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 1000;
  run(own + "/quickstart", 3, 16, 2, 4096, steps);
  run(own + "/large", 54, 64, 8, int64_t{1} << 20, steps);
  std::filesystem::remove_all(own);
  return 0;
}
