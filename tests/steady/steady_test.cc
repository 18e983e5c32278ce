// A run that has started neither allocates nor grows, and takes the memory that it said it would.
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/train/memory_report.h"
#include "tests/support/tiny_routers.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // the sanitizer's own memory is in the numbers
#else
constexpr bool kSanitized = false;
#endif

// Looks at the process in the midst of a run, from a backend whose optimizer sees steps go by. Kernels are plain
// functions, so what it keeps is global.
OptimizerKernels plain;
int64_t first_step, last_step, allocations, first_rss, last_rss;
bool watching;
constexpr int kMostWatched = 2;  // threads that the pool surely has, however few processors there are
std::optional<AllocationGuard> guards[kMostWatched];  // of each thread of the pool
std::string stack;

// 1 - beta2^t tells the step, up to some six hundred.
int64_t step_of(const AdamStep& a) { return std::llround(std::log(1 - a.c2) / std::log(a.beta2)); }

// f(part) on the thread whose block the part is in: no part ends before all have begun, so none is left to the caller.
template <class F>
void on_each_thread(ThreadPool& pool, F&& f) {
  std::atomic<int> begun{0};
  pool.run([&](int part) {
    begun.fetch_add(1);
    while (begun.load() < pool.size()) std::this_thread::yield();
    f(part);
  });
}

void look(const Context& ctx, const AdamStep& args) {
  const int64_t step = step_of(args);
  if (step == first_step && !watching) {
    watching = true;
    first_rss = read_process_memory().rss_bytes;
    AllocationGuard::reset();
    on_each_thread(*ctx.pool, [](int thread) { guards[thread].emplace(); });
  } else if (step == last_step && watching) {
    watching = false;
    allocations = AllocationGuard::count();
    stack = AllocationGuard::first_stack();
    on_each_thread(*ctx.pool, [](int thread) { guards[thread].reset(); });
    last_rss = read_process_memory().rss_bytes;
  }
}

void adamw_with_a_look(const Context& ctx, const AdamStep& args) {
  look(ctx, args);
  plain.adamw(ctx, args);
}

void lamb_with_a_look(const Context& ctx, const LambNorms& args) {
  if (!ctx.dry_run) look(ctx, args.step);
  plain.lamb_norms(ctx, args);
}

using Prepare = void (*)(ParameterStore&);

// All tokens to expert 5, if choices look at the correction bias.
void all_to_one(ParameterStore& store) {
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& spec = store.specs()[static_cast<size_t>(i)];
    if (spec.role != TensorRole::kCorrectionBias) continue;
    std::vector<float> bias(static_cast<size_t>(spec.shape.elements()));
    bias[5] = 100;
    store.set(i, bias.data());
  }
}

void run_with_looks(RunConfig config, int64_t first, int64_t last, int threads, Prepare prepare = nullptr) {
  Backend backend = backend_by_name("cpu");
  plain = backend.optimizer;
  backend.optimizer.adamw = adamw_with_a_look;
  backend.optimizer.lamb_norms = lamb_with_a_look;
  first_step = first;
  last_step = last;
  allocations = -1;
  watching = false;
  ThreadPool pool(threads);
  ASSERT_LE(threads, kMostWatched);
  Trainer trainer(config, backend, pool, {});
  if (prepare) prepare(trainer.engine().store());
  trainer.run();
}

// The step's thread, which here also reads the data, and the pool's.
TEST(Steady, ARunningStepAllocatesNothing) {
  struct Case {
    const char *dtype, *schedule;
    Recompute recompute;
    OptimizerName optimizer;
    const char* moments = "f32";
  };
  for (const auto& [dtype, schedule, recompute, optimizer, moments] :
       {Case{"bf16", "1f1b", Recompute::kNone, OptimizerName::kAdamW},
        Case{"f32", "1f1b", Recompute::kSelective, OptimizerName::kAdamW},
        Case{"bf16", "zero_bubble", Recompute::kFull, OptimizerName::kAdamW, "bf16"},
        Case{"f32", "zero_bubble", Recompute::kNone, OptimizerName::kLamb, "bf16"}}) {
    const Workplace work;
    work.write_data("train", 30, 1);  // the epoch changes on the way
    RunConfig c = tiny_run_config(work);
    c.data.valid.clear();
    c.data.prefetch = 0;
    c.training.dtype = dtype;
    c.parallel.schedule = schedule;
    c.parallel.recompute = recompute;
    c.optimizer.name = optimizer;
    c.optimizer.moments_dtype = moments;
    c.training.steps = 14;
    c.checkpoint.every_steps = 0;
    c.checkpoint.export_model = false;
    c.monitor.log_every_steps = 1;
    run_with_looks(c, 3, 13, 2);  // from the update of step 3 on: metrics, TensorBoard, the next batch, the step
    EXPECT_EQ(allocations, 0) << dtype << " " << schedule << "\n" << stack;
  }
}

// Whatever is chosen, counted and dropped: choices in a spread, and all to one expert.
TEST(Steady, NoRouterAllocates) {
  for (const TinyRouter& router : tiny_routers())
    for (const RoutingUnit unit : {RoutingUnit::kSequence, RoutingUnit::kMicroBatch, RoutingUnit::kGlobal}) {
      const Workplace work;
      work.write_data("train", 30, 1);
      RunConfig c = tiny_run_config(work);
      c.model.config = router.config;
      c.model.config.moe_router_bias_update_rate = router.config.moe_use_aux_free ? 0.01 : 0;
      c.model.config.moe_orthogonal_loss_lambda = 0.01;
      c.data.valid.clear();
      c.data.prefetch = 0;
      c.training.routing_unit = unit;
      c.training.balance_loss = router.options.balance_loss;
      c.training.balance_counts = router.options.balance_counts;
      c.training.orthogonal = unit == RoutingUnit::kGlobal ? Orthogonal::kStep : Orthogonal::kLoss;
      c.training.steps = 9;
      c.checkpoint.every_steps = 0;
      c.checkpoint.export_model = false;
      const bool skewed = unit == RoutingUnit::kMicroBatch;
      run_with_looks(c, 3, 8, skewed ? 2 : 1, skewed ? all_to_one : nullptr);
      EXPECT_EQ(allocations, 0) << router.name << ", unit " << static_cast<int>(unit) << "\n" << stack;
    }
}

TEST(Steady, FiveHundredStepsGrowByLessThanAMegabyte) {
  if (kSanitized) GTEST_SKIP() << "not under a sanitizer";
  const Workplace work;
  work.write_data("train", 60, 1);  // some thirty epochs
  RunConfig c = tiny_run_config(work);
  c.data.valid.clear();
  c.training.dtype = "bf16";
  c.training.steps = 521;
  c.checkpoint.every_steps = 0;
  run_with_looks(c, 20, 520, 1);
  EXPECT_EQ(allocations, 0) << stack;
  EXPECT_LT(last_rss - first_rss, 1 << 20) << first_rss << " to " << last_rss;
}

// ---- First touch.

struct Faults {
  int64_t first, second, resident_growth;  // of the first step and the second; bytes that the first step brought
};

// Of an engine's first two steps, in pages of 4 KiB.
Faults faults_of_steps(const RunConfig& c, bool touched) {
  ThreadPool pool(2);
  StepEngine engine(c, backend_by_name("cpu"), pool);
  if (touched) engine.first_touch_state();
  engine.store().initialize(c.model.config, c.model.init_method, 1, pool);
  if (touched) engine.first_touch_work();
  Rows rows(static_cast<size_t>(c.training.micro_batch_size), {static_cast<int>(c.training.seq_length)});
  const std::vector<MicroBatch> batches = {random_batch(c.model.config, rows, 3)};
  StepReport report;
  std::string why;
  const auto faults = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return int64_t{usage.ru_minflt};
  };
  Faults f{};
  const int64_t before = faults(), resident = read_process_memory().rss_bytes;
  engine.step(1, batches, nullptr, report, why);
  f.first = faults() - before;
  f.resident_growth = read_process_memory().rss_bytes - resident;
  const int64_t between = faults();
  engine.step(2, batches, nullptr, report, why);
  f.second = faults() - between;
  return f;
}

TEST(FirstTouch, TheFirstStepFindsItsMemory) {
  if (kSanitized) GTEST_SKIP() << "not under a sanitizer";
  const Workplace work;
  RunConfig c = tiny_run_config(work);
  ModelConfig& m = c.model.config;
  m.num_nextn_predict_layers = 0;
  m.vocab_size = 4000;
  m.hidden_size = 256;
  m.intermediate_size = 640;
  m.moe_intermediate_size = 128;
  c.training.seq_length = 256;
  c.training.global_batch_size = c.training.micro_batch_size = 4;
  ASSERT_EQ(::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);  // faults are then counted in pages, the same everywhere
  for (const auto& [dtype, schedule] : {std::pair{"bf16", "1f1b"}, std::pair{"f32", "zero_bubble"}}) {
    c.training.dtype = dtype;
    c.parallel.schedule = schedule;
    const Faults without = faults_of_steps(c, false), with = faults_of_steps(c, true);
    SCOPED_TRACE(fmt::format("{}: first step {} faults and {} bytes without, {} and {} with; second {}", dtype,
                             without.first, without.resident_growth, with.first, with.resident_growth, with.second));
    EXPECT_GT(without.first, 8000);                           // what this test is about: over 32 MiB
    EXPECT_LT(with.first - with.second, without.first / 50);  // libraries and their caches
    EXPECT_LT(with.resident_growth, without.resident_growth / 50);
  }
  ::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

// ---- Prediction.

struct Shape {
  const char* name;
  const char* dtype;
  bool moe;
  const char* schedule;
  Recompute recompute;
  int document_tokens;
};
void PrintTo(const Shape& s, std::ostream* out) { *out << s.name; }

class Memory : public ::testing::TestWithParam<Shape> {};

TEST_P(Memory, IsWhatWasPredicted) {
  if (kSanitized) GTEST_SKIP() << "not under a sanitizer";
  const Shape& shape = GetParam();
  const Workplace work;
  RunConfig c = tiny_run_config(work);
  ModelConfig& m = c.model.config;
  if (!shape.moe) m = tiny_dense();
  m.vocab_size = 4000;
  m.hidden_size = 256;
  m.intermediate_size = 640;
  m.num_attention_heads = 8;
  m.num_key_value_heads = 4;
  m.head_dim = 32;
  m.moe_num_experts = 8;
  m.moe_k = 2;
  m.moe_intermediate_size = 128;
  m.num_hidden_layers = 3;
  {
    const Rng rng(1, "documents");
    IndexedDatasetWriter writer(work / "train", m.vocab_size, false);
    uint64_t at = 0;
    for (int64_t tokens = 0; tokens < 40000;) {
      std::vector<int32_t> ids(1 + rng.below(at++, static_cast<uint64_t>(2 * shape.document_tokens)));
      for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(at++, static_cast<uint64_t>(m.vocab_size)));
      tokens += static_cast<int64_t>(ids.size());
      writer.add_document(ids);
    }
    writer.finish();
  }
  c.data.valid = c.data.train;
  c.training.dtype = shape.dtype;
  c.training.steps = 2;
  c.training.seq_length = 256;
  c.training.global_batch_size = 4;
  c.training.micro_batch_size = 4;
  c.training.eval_batches = 1;
  c.checkpoint.every_steps = 1;
  c.parallel.schedule = shape.schedule;
  c.parallel.recompute = shape.recompute;
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak of this test, not of those before it
  const RunSummary s = train(c, 2);
  EXPECT_GT(s.memory.predicted_bytes, 80 << 20);
  EXPECT_LT(std::abs(s.memory.error()), 0.1) << format_memory_report(s.memory);
  if (std::string(shape.name) != "bf16_moe") return;
  // A run that goes on from a checkpoint reads all of it first.
  std::filesystem::remove_all(checkpoint_path(c.run.dir, 2));
  std::ofstream("/proc/self/clear_refs") << "5";
  const RunSummary resumed = train(c, 2);
  EXPECT_EQ(resumed.first_step, 2);
  EXPECT_LT(std::abs(resumed.memory.error()), 0.1) << format_memory_report(resumed.memory);
}

// The worst routing and a spread one: the same budget holds for both, and both are what plain loops compute.
TEST(PredictedMemory, HoldsForAllTokensToOneExpert) {
  if (kSanitized) GTEST_SKIP() << "not under a sanitizer";
  const Workplace work;
  work.write_data("train", 300, 1);
  RunConfig c = tiny_run_config(work);
  ModelConfig& m = c.model.config;
  m.moe_k = 1;
  m.hidden_size = m.moe_intermediate_size = 48;
  m.num_nextn_predict_layers = 0;
  m.num_hidden_layers = 8;
  m.max_position_embeddings = 1024;
  c.data.valid.clear();
  c.training.steps = 1;
  c.training.seq_length = 1024;
  c.training.micro_batch_size = 4;
  c.checkpoint.every_steps = 0;
  int64_t peak[2];
  for (const bool skewed : {false, true}) {
    std::vector<double> losses[2], norms[2];
    for (const bool is_ref : {false, true}) {
      c.run.dir = work / fmt::format("{}-{}", skewed, is_ref);
      std::ofstream("/proc/self/clear_refs") << "5";
      ThreadPool pool(1);
      Trainer trainer(c, backend_by_name(is_ref ? "ref" : "cpu"), pool, {});
      if (skewed) all_to_one(trainer.engine().store());
      const RunSummary s = trainer.run();
      EXPECT_LT(std::abs(s.memory.error()), 0.1) << format_memory_report(s.memory);
      for (const double worst : metrics_values(c.run.dir, "expert_max_over_mean"))
        EXPECT_TRUE(skewed ? worst == static_cast<double>(m.moe_num_experts) : worst < 5) << worst;
      losses[is_ref] = metrics_values(c.run.dir, "loss");
      norms[is_ref] = metrics_values(c.run.dir, "grad_norm");
      if (!is_ref) peak[skewed] = s.memory.peak_bytes;
    }
    EXPECT_NEAR(losses[0].at(0), losses[1].at(0), 1e-5) << skewed;
    EXPECT_NEAR(norms[0].at(0), norms[1].at(0), 1e-4 * norms[1].at(0)) << skewed;
  }
  EXPECT_NEAR(static_cast<double>(peak[1]), static_cast<double>(peak[0]), 0.05 * static_cast<double>(peak[0]));
}

// A small model and much accumulation: what is read ahead is a good part of all.
TEST(PredictedMemory, BatchesReadAheadArePredicted) {
  if (kSanitized) GTEST_SKIP() << "not under a sanitizer";
  const Workplace work;
  work.write_data("train", 16000, 1);
  RunConfig c = tiny_run_config(work);
  c.data.valid.clear();
  c.training.steps = 3;
  c.training.global_batch_size = 16000;
  c.training.micro_batch_size = 400;
  c.checkpoint.every_steps = 0;
  std::ofstream("/proc/self/clear_refs") << "5";
  const RunSummary s = train(c, 2);
  EXPECT_GT(s.memory.predicted_bytes, 18 << 20);
  EXPECT_LT(std::abs(s.memory.error()), 0.1) << format_memory_report(s.memory);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Memory,
    ::testing::Values(Shape{"bf16_moe", "bf16", true, "1f1b", Recompute::kNone, 200},
                      Shape{"f32_moe_short_documents", "f32", true, "1f1b", Recompute::kSelective, 12},
                      Shape{"f32_dense_split", "f32", false, "zero_bubble", Recompute::kNone, 500},
                      Shape{"bf16_moe_split_full", "bf16", true, "zero_bubble", Recompute::kFull, 60}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace concerto::test
