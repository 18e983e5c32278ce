#include "tests/multirank/layout_runs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/optim/gradient_sync.h"
#include "concerto/topology/layout.h"
#include "concerto/train/signals.h"

namespace concerto::test {
namespace fs = std::filesystem;

RunLayout one_rank() { return {.name = "one rank", .ranks = 1, .parallel = {}}; }

const std::vector<RunLayout>& run_layouts() {
  static const std::vector<RunLayout> layouts{
      one_rank(),
      {"dp2", 2, {.zero = 0}},
      {"dp3", 3, {.zero = 1}},
      {"dp4 zero2", 4, {.zero = 2}},
      {"tp2", 2, {.tp = 2}},
      {"tp4", 4, {.tp = 4}},
      {"pp2", 2, {.pp = 2}},
      {"pp3 zero_bubble", 3, {.pp = 3, .schedule = "zero_bubble"}},
      {"pp2 interleaved", 2, {.pp = 2, .vpp = 2, .schedule = "interleaved"}},
      {"ep2", 2, {.ep = 2, .zero = 2}},
      {"dp2 pp2 zero_bubble_v", 4, {.pp = 2, .schedule = "zero_bubble_v"}},
      {"tp2 dp2 pp2 ep2 etp2", 8, {.tp = 2, .pp = 2, .ep = 2, .etp = 2, .recompute = Recompute::kSelective}},
  };
  return layouts;
}

const RunLayout& run_layout(const std::string& name) {
  for (const RunLayout& l : run_layouts())
    if (l.name == name) return l;
  throw std::out_of_range(name);
}

RunConfig layout_run_config(const Workplace& work, const std::string& dir) {
  RunConfig c = tiny_run_config(work, dir);
  c.backend = "ref";
  c.training.dtype = "f64";
  c.training.steps = 7;
  c.training.micro_batch_size = 1;
  c.training.seq_length = 16;
  c.training.eval_every_steps = 3;
  c.checkpoint.every_steps = kPairStep;
  return c;
}

namespace {

struct CloseFile {
  void operator()(std::FILE* f) const { std::fclose(f); }
};

std::string text_of(std::FILE* file) {
  std::fflush(file);
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  return text;
}

void train_rank(const RunConfig& config, Communicator* world, const RankTrainer& before, LayoutRun& run) {
  const MeshSizes sizes = resolve_layout(config, world ? world->size() : 1);
  std::unique_ptr<RankGroups> groups;
  if (world)
    groups = std::make_unique<RankGroups>(*world, sizes, kv_sharers(config.model.config, sizes.tp),
                                          step_schedule(config, sizes).chunks);
  const std::unique_ptr<std::FILE, CloseFile> screen(std::tmpfile());
  ThreadPool pool(1);
  Trainer trainer(config, backend_by_name(config.backend), pool, {}, screen.get(), groups.get());
  if (before) before(trainer, groups.get());
  const RunSummary summary = trainer.run();
  if (!world || world->rank() == 0) run = {summary, text_of(screen.get())};
}

void expect_same_value(const nlohmann::json& got, const nlohmann::json& want, const std::string& where) {
  ASSERT_EQ(got.is_number(), want.is_number()) << where;
  if (want.is_object() || want.is_array()) {
    ASSERT_EQ(got.size(), want.size()) << where << ": " << got << " and " << want;
    for (const auto& [key, value] : want.items()) {
      const bool there = want.is_array() || got.contains(key);
      ASSERT_TRUE(there) << where << "." << key;
      expect_same_value(want.is_array() ? got[std::stoul(key)] : got[key], value, where + "." + key);
    }
  } else if (want.is_number_float()) {
    const double w = want.get<double>();
    EXPECT_NEAR(got.get<double>(), w, kRunRounding * std::max(1e-3, std::abs(w))) << where;
  } else {
    EXPECT_EQ(got, want) << where;
  }
}

}  // namespace

LayoutRun train_in(const RunConfig& base, const RunLayout& layout, const RankTrainer& before) {
  RunConfig config = base;
  config.parallel = layout.parallel;
  LayoutRun run;
  const StopSignals signals;
  if (layout.ranks == 1)
    train_rank(config, nullptr, before, run);
  else
    run_local_ranks(layout.ranks, [&](Communicator& world) { train_rank(config, &world, before, run); });
  return run;
}

void expect_same_rows(const std::string& got_dir, const std::string& want_dir) {
  const std::vector<std::string> got = metrics_rows(got_dir), want = metrics_rows(want_dir);
  ASSERT_EQ(got.size(), want.size());
  ASSERT_FALSE(want.empty());
  for (size_t i = 0; i < want.size(); ++i)
    expect_same_value(nlohmann::json::parse(got[i]), nlohmann::json::parse(want[i]), fmt::format("row {}", i + 1));
}

void check_pair(const Workplace& work, const RunLayout& a, const RunLayout& b, const std::string& whole) {
  SCOPED_TRACE(a.name + " to " + b.name);
  const std::string from = work / ("from " + a.name), to = work / fmt::format("{} to {}", a.name, b.name);
  RunConfig c = layout_run_config(work, "from " + a.name);
  c.training.eval_every_steps = 0;
  c.checkpoint.export_model = false;
  if (!fs::exists(from)) train_in(c, a);
  c.run.dir = to;
  c.run.resume = checkpoint_path(from, kPairStep);
  c.checkpoint.every_steps = 0;
  const std::string again = work / fmt::format("{} again {}", a.name, b.name);
  train_in(c, b, [&](Trainer& trainer, const RankGroups* groups) {
    const ParameterStore& store = trainer.engine().store();
    CheckpointMeta meta = CheckpointReader(c.run.resume).meta();
    SaveOptions options;
    options.world = groups ? &groups->world() : nullptr;
    options.model = &c.model.config;
    const std::vector<uint8_t> owned = groups ? owned_tensors(store.specs(), *groups) : std::vector<uint8_t>{};
    save_checkpoint(again, meta, checkpoint_tensors(store, owned), options);
  });
  const std::vector<std::string> content = checkpoint_contents(c.run.resume);
  EXPECT_FALSE(content.empty());
  EXPECT_EQ(checkpoint_contents(checkpoint_path(again, kPairStep)), content);
  const std::vector<double> got = metrics_values(to, "loss"), want = metrics_values(whole, "loss");
  ASSERT_EQ(got.size() + kPairStep, want.size());
  ASSERT_EQ(got.size(), 5u);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i + kPairStep], kRunRounding * want[i + kPairStep]) << "step " << i + kPairStep + 1;
  for (const std::string& done : {again, to}) fs::remove_all(done);
}

}  // namespace concerto::test
