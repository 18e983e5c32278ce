// The training loop on tiny models and data: what a user sees of a run, of its end and of going on.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "concerto/base/cores.h"
#include "concerto/base/files.h"
#include "concerto/checkpoint/hf_convert.h"
#include "concerto/checkpoint/run_lock.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/eval_command.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/tensor/values.h"
#include "concerto/train/load_series.h"
#include "concerto/train/signals.h"
#include "tests/support/tiny_routers.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {
namespace fs = std::filesystem;

class Training : public ::testing::Test {
 protected:
  Training() {
    work_.write_data("train", 60, 1);
    work_.write_data("valid", 9, 2);
  }
  RunConfig config(const std::string& dir = "run") const { return tiny_run_config(work_, dir); }

  void copy_killed_run(const std::string& from, const std::string& to, int64_t step) const {
    work_.copy_killed_run(from, to, step);
  }
  void expect_same_run(const std::string& a, const std::string& b, int64_t last) const {
    EXPECT_EQ(metrics_rows(work_ / a), metrics_rows(work_ / b));
    EXPECT_TRUE(read_text_file(work_ / a + "/expert_load.bin") == read_text_file(work_ / b + "/expert_load.bin"));
    EXPECT_EQ(checkpoint_contents(checkpoint_path(work_ / a, last)),
              checkpoint_contents(checkpoint_path(work_ / b, last)));
  }

  Workplace work_;
};

double mean(const std::vector<double>& v, size_t begin, size_t count) {
  return std::accumulate(v.begin() + static_cast<std::ptrdiff_t>(begin),
                         v.begin() + static_cast<std::ptrdiff_t>(begin + count), 0.0) /
         static_cast<double>(count);
}

TEST_F(Training, LearnsAndLeavesItsFiles) {
  RunConfig c = config();
  c.training.steps = 80;
  c.training.dtype = "bf16";
  c.checkpoint.every_steps = 0;
  c.monitor.trace_steps = {2, 3};
  const RunSummary s = train(c);
  EXPECT_EQ(s.step, 80);
  EXPECT_EQ(s.stopped_by, "");
  const std::vector<double> loss = metrics_values(c.run.dir, "loss"), valid = metrics_values(c.run.dir, "valid_loss");
  ASSERT_EQ(loss.size(), 80u);
  EXPECT_NEAR(loss[0], std::log(40), 0.2);
  EXPECT_LT(mean(loss, 70, 10), 0.75 * mean(loss, 0, 5));
  EXPECT_LT(valid.back(), 0.75 * valid.front() + 0.5);
  EXPECT_EQ(s.final_loss, loss.back());
  EXPECT_EQ(s.best_valid_loss, *std::min_element(valid.begin(), valid.end()));
  for (const char* file : {"config.yaml", "metrics.jsonl", "loss.svg", "trace.json", "latest",
                           "checkpoint-80/manifest.json", "model/config.json", "model/model.safetensors"})
    EXPECT_TRUE(fs::exists(fs::path(c.run.dir) / file)) << file;
  std::vector<double> tokens = metrics_values(c.run.dir, "tokens");
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 4 * 32), 80);
}

// Every token of every micro-batch is counted, and no step twice.
TEST_F(Training, CountsTheLoadOfEveryExpert) {
  RunConfig c = config();
  train(c);
  const LoadSeries s = read_load_series(c.run.dir + "/expert_load.bin", {});
  EXPECT_EQ(s.steps, 12);
  EXPECT_EQ(s.last_step, 12);
  EXPECT_EQ(s.experts, c.model.config.moe_num_experts);
  const std::vector<double> worst = metrics_values(c.run.dir, "expert_max_over_mean");
  double highest = 0;
  ASSERT_FALSE(s.layers.empty());
  for (const LayerSeries& layer : s.layers) {
    EXPECT_EQ(layer.total.choices, 12 * 4 * 32 * c.model.config.moe_k);
    EXPECT_FALSE(layer.total.has_drops || layer.total.has_bias);
    highest = std::max(highest, layer.worst_max_over_mean);
  }
  EXPECT_EQ(highest, *std::max_element(worst.begin(), worst.end()));
}

// What a full expert drops is counted, and seen.
TEST_F(Training, ShowsTheDropsOfFullExperts) {
  RunConfig c = config();
  c.training.steps = 2;
  c.model.config.moe_capacity = {1, 1, 1};  // as many rows an expert as an even load has; no load is even
  train(c);
  const LoadSeries s = read_load_series(c.run.dir + "/expert_load.bin", {});
  for (const LayerSeries& layer : s.layers) {
    EXPECT_TRUE(layer.total.has_drops);
    EXPECT_GT(layer.total.dropped, 0);
    EXPECT_LT(layer.total.dropped, layer.total.choices);
  }
  const auto row = nlohmann::json::parse(metrics_rows(c.run.dir).at(0));
  EXPECT_GT(row["expert_dropped"]["1"].get<double>(), 0);
}

// A bias of zero is not shown; one that is something appears with its range, layer by layer.
TEST_F(Training, ShowsTheRangeOfTheCorrectionBias) {
  RunConfig c = config();
  c.training.steps = 2;
  ThreadPool pool(1);
  {
    Trainer trainer(c, backend_by_name("cpu"), pool, {});
    ParameterStore& store = trainer.engine().store();
    const int bias = store.find("model.layers.1.mlp.moe_statics.e_score_correction_bias");
    ASSERT_GE(bias, 0);
    std::vector<float> values(static_cast<size_t>(c.model.config.moe_num_experts), 0.25f);
    values[1] = -0.5f;
    store.set(bias, values.data());
    trainer.run();
  }
  const LoadSeries s = read_load_series(c.run.dir + "/expert_load.bin", {});
  EXPECT_TRUE(s.layers[0].total.has_bias);
  EXPECT_EQ(s.layers[0].total.bias_min, -0.5);
  EXPECT_EQ(s.layers[0].total.bias_max, 0.25);
  const auto row = nlohmann::json::parse(metrics_rows(c.run.dir).at(0));
  EXPECT_EQ(row["expert_bias"]["1"], (nlohmann::json{-0.5, 0.25}));
}

TEST_F(Training, TellsOfStarvingExpertsAndCollapsedRouters) {
  RunConfig c = config();
  c.monitor.load_warning_steps = 3;
  c.monitor.starving_below = 1;  // every expert below the mean
  c.monitor.collapsed_below = 1;
  c.monitor.expert_load = false;
  testing::internal::CaptureStdout();
  train(c);
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_NE(out.find("WARNING: step 3: layer 1: router collapse: choices spread over "), std::string::npos) << out;
  EXPECT_NE(out.find(" starve"), std::string::npos) << out;
  EXPECT_FALSE(fs::exists(c.run.dir + "/expert_load.bin"));
  c = config("quiet");
  testing::internal::CaptureStdout();
  train(c);
  EXPECT_EQ(testing::internal::GetCapturedStdout().find("WARNING"), std::string::npos);
}

TEST_F(Training, TwoRunsAreBitEqual) {
  for (const char* dtype : {"f32", "bf16"}) {
    RunConfig a = config(std::string("a-") + dtype), b = config(std::string("b-") + dtype);
    a.training.dtype = b.training.dtype = dtype;
    b.data.prefetch = 0;  // where the data is read is not the maths
    train(a, 1);
    train(b, 2);
    expect_same_run(std::string("a-") + dtype, std::string("b-") + dtype, 12);
  }
}

// Where threads run is not the maths; and the start says where.
TEST_F(Training, PinnedThreadsGiveTheSameBits) {
  train(config("free"), 2);
  RunConfig c = config("pinned");
  c.run.threads = 0;
  c.run.cores = format_cores(allowed_cores());
  testing::internal::CaptureStdout();
  {
    const StopSignals signals;
    ThreadPool pool(c.run.threads, pinned_cores(c.run));
    Trainer(c, backend_by_name("cpu"), pool, {}).run();
  }
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_NE(out.find(fmt::format("threads   {}, pinned to cores {}\n", allowed_cores().size(), c.run.cores)),
            std::string::npos)
      << out;
  expect_same_run("free", "pinned", 12);
}

TEST_F(Training, StopAndResumeEqualsNeverStopping) {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string whole = std::string("whole-") + dtype, cut = std::string("cut-") + dtype;
    RunConfig c = config(whole);
    c.training.dtype = dtype;
    train(c);
    EXPECT_EQ(metrics_values(c.run.dir, "loss").size(), 12u);
    EXPECT_EQ(metrics_values(c.run.dir, "valid_loss").size(), 2u);
    copy_killed_run(whole, cut, 6);
    RunConfig again = config(cut);
    again.training.dtype = dtype;
    const RunSummary s = train(again);
    EXPECT_EQ(s.first_step, 7);
    expect_same_run(whole, cut, 12);
    expect_same_run(whole, cut, 9);
  }
}

// The plan is not the maths: a run may go on with another one.
TEST_F(Training, ResumesWithAnotherPlan) {
  train(config("whole"));
  copy_killed_run("whole", "cut", 3);
  RunConfig c = config("cut");
  c.parallel.schedule = "zero_bubble";
  c.parallel.recompute = Recompute::kFull;
  EXPECT_EQ(train(c, 2).first_step, 4);
  expect_same_run("whole", "cut", 12);
}

TEST_F(Training, ResumesWithLamb) {
  RunConfig c = config("whole");
  c.optimizer.name = OptimizerName::kLamb;
  train(c);
  copy_killed_run("whole", "cut", 9);
  c.run.dir = work_ / "cut";
  train(c);
  expect_same_run("whole", "cut", 12);
}

// What routers learn outside the optimizer goes on as well: the correction bias and the orthogonal step.
TEST_F(Training, ResumesWithEveryRouter) {
  for (const TinyRouter& router : tiny_routers()) {
    const std::string whole = std::string(router.name) + "-whole", cut = std::string(router.name) + "-cut";
    RunConfig c = config(whole);
    c.model.config = router.config;
    c.model.config.moe_router_bias_update_rate = router.config.moe_use_aux_free ? 0.05 : 0;
    c.model.config.moe_orthogonal_loss_lambda = 0.1;
    c.training.steps = 4;
    c.training.routing_unit = router.sinkhorn ? RoutingUnit::kGlobal : RoutingUnit::kSequence;
    c.training.balance_loss = router.options.balance_loss;
    c.training.balance_counts = router.options.balance_counts;
    c.training.orthogonal = router.drops ? Orthogonal::kStep : Orthogonal::kLoss;
    c.checkpoint.every_steps = 2;
    train(c);
    copy_killed_run(whole, cut, 2);
    c.run.dir = work_ / cut;
    EXPECT_EQ(train(c).first_step, 3);
    expect_same_run(whole, cut, 4);
  }
}

// Moments in bf16 are saved and read as they are, and a resumed run draws what the whole one drew.
TEST_F(Training, ResumesWithBf16Moments) {
  for (const OptimizerName name : {OptimizerName::kAdamW, OptimizerName::kLamb}) {
    const std::string whole = fmt::format("whole-{}", static_cast<int>(name)), cut = whole + "-cut";
    RunConfig c = config(whole);
    c.training.dtype = "bf16";
    c.optimizer.name = name;
    c.optimizer.moments_dtype = "bf16";
    train(c, 1);
    const CheckpointReader reader(checkpoint_path(c.run.dir, 9));
    int moments = 0;
    for (const CheckpointTensor& t : reader.tensors()) {
      const bool weight = t.name.starts_with(kWeightPrefix);
      moments += !weight;
      EXPECT_EQ(t.dtype, weight ? DType::kF32 : DType::kBF16) << t.name;
    }
    EXPECT_GT(moments, 10);
    copy_killed_run(whole, cut, 9);
    c.run.dir = work_ / cut;
    c.parallel.schedule = "zero_bubble";
    EXPECT_EQ(train(c, 3).first_step, 10);
    expect_same_run(whole, cut, 12);
  }
}

TEST_F(Training, AnotherTypeOfMomentsIsRefusedWithTheSettingsName) {
  train(config());
  RunConfig c = config();
  c.optimizer.moments_dtype = "bf16";
  expect_error(ErrorCode::kCheckpoint, {"optimizer.moments_dtype", "f32", "bf16"}, [&] { train(c); });
}

TEST_F(Training, SigtermSavesAndEndsAndTheRunGoesOn) {
  RunConfig whole = config("whole"), cut = config("cut");
  whole.training.steps = cut.training.steps = 60;
  whole.checkpoint.every_steps = cut.checkpoint.every_steps = 0;
  // After every step, so that the signal cuts an evaluation off, which the resumed run has to make up for.
  whole.training.eval_every_steps = cut.training.eval_every_steps = 1;
  train(whole);
  std::thread killer([&] {
    const std::string file = cut.run.dir + "/metrics.jsonl";
    const auto lines = [&] {
      std::ifstream in(file);
      return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
    };
    while (lines() < 5) std::this_thread::sleep_for(std::chrono::microseconds(200));
    ::kill(::getpid(), SIGTERM);
  });
  const RunSummary s = train(cut);
  killer.join();
  ASSERT_EQ(s.stopped_by, "SIGTERM");
  ASSERT_LT(s.step, 60);
  EXPECT_GE(s.step, 3);  // five rows: three steps and two evaluations
  EXPECT_EQ(find_latest(cut.run.dir).step, s.step);
  EXPECT_FALSE(fs::exists(cut.run.dir + "/model"));  // half a run exports nothing
  EXPECT_EQ(metrics_values(cut.run.dir, "loss").size(), static_cast<size_t>(s.step));
  const RunSummary rest = train(cut);
  EXPECT_EQ(rest.first_step, s.step + 1);
  EXPECT_EQ(rest.stopped_by, "");
  expect_same_run("whole", "cut", 60);
}

TEST_F(Training, GoesOnFromANamedCheckpoint) {
  RunConfig c = config();
  train(c);
  const auto rows = metrics_rows(c.run.dir);
  const auto end = checkpoint_contents(checkpoint_path(c.run.dir, 12));
  c.run.resume = checkpoint_path(c.run.dir, 3);
  EXPECT_EQ(train(c).first_step, 4);
  EXPECT_EQ(metrics_rows(c.run.dir), rows);
  EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 12)), end);
  c.run.resume = work_ / "run/checkpoint-5";
  expect_error(ErrorCode::kCheckpoint, {"checkpoint-5"}, [&] { train(c); });
}

// Evaluations and saves fall on different steps. Noise to be validated on: the more is learnt, the worse.
TEST_F(Training, TheBestCheckpointIsKeptWheneverItIsFound) {
  work_.write_data("noise", 10, 2, 1.0);
  RunConfig c = config();
  c.data.valid = {{work_ / "noise", 1.0}};
  c.training.eval_every_steps = 2;
  c.checkpoint.every_steps = 5;
  c.checkpoint.keep = 1;
  train(c);
  const std::vector<double> losses = metrics_values(c.run.dir, "valid_loss");
  ASSERT_EQ(losses.size(), 6u);
  const auto best = std::min_element(losses.begin(), losses.end());
  const int64_t step = 2 * (1 + (best - losses.begin()));
  ASSERT_TRUE(step != 10 && step != 12) << "saved anyway";
  EXPECT_EQ(CheckpointReader(checkpoint_path(c.run.dir, step)).meta().valid_loss, *best);
  EXPECT_EQ(list_checkpoints(c.run.dir).size(), 2u);
  // Not where checkpoints are wanted at the end only.
  c.run.dir = work_ / "end";
  c.checkpoint.every_steps = 0;
  train(c);
  EXPECT_EQ(list_checkpoints(c.run.dir).size(), 1u);
}

TEST_F(Training, PassesOverADamagedCheckpoint) {
  RunConfig c = config();
  train(c);
  const auto rows = metrics_rows(c.run.dir);
  const std::string file = checkpoint_path(c.run.dir, 12) + "/weights-00001-of-00001.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_EQ(train(c).first_step, 10);
  EXPECT_EQ(metrics_rows(c.run.dir), rows);
}

// Starting anew would write over a run that may still be mended.
TEST_F(Training, ARunWhoseCheckpointsAreAllDamagedIsRefused) {
  RunConfig c = config();
  train(c);
  const auto rows = metrics_rows(c.run.dir);
  for (const CheckpointInfo& info : list_checkpoints(c.run.dir)) fs::remove(info.path + "/manifest.json");
  expect_error(ErrorCode::kCheckpoint, {c.run.dir, "checkpoint-12", "manifest.json", "another run.dir"},
               [&] { train(c); });
  EXPECT_EQ(metrics_rows(c.run.dir), rows);
}

TEST_F(Training, SettingsThatCannotBeReadAreNamed) {
  RunConfig c = config();
  train(c);
  std::ofstream(c.run.dir + "/config.yaml") << "{{{";
  expect_error(ErrorCode::kCheckpoint, {c.run.dir, "config.yaml:1", "Remove that file"}, [&] { train(c); });
  fs::remove(c.run.dir + "/config.yaml");
  EXPECT_EQ(train(c).first_step, 13);
}

// A run that ended before its first checkpoint (a loss that is not finite, a kill) may be tried with other settings.
TEST_F(Training, WithoutACheckpointOtherSettingsAreFine) {
  train(config());
  for (const CheckpointInfo& info : list_checkpoints(config().run.dir)) fs::remove_all(info.path);
  RunConfig c = config();
  c.optimizer.lr = 0.02;
  EXPECT_EQ(train(c).first_step, 1);
}

TEST_F(Training, ResumeNever) {
  RunConfig c = config();
  c.run.resume = "never";
  EXPECT_EQ(train(c).first_step, 1);
  const auto end = checkpoint_contents(checkpoint_path(c.run.dir, 12));
  expect_error(ErrorCode::kCheckpoint, {c.run.dir, "never"}, [&] { train(c); });
  EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 12)), end);
}

TEST_F(Training, AFinishedRunHasNothingToDo) {
  const RunConfig c = config();
  train(c);
  const auto rows = metrics_rows(c.run.dir);
  const RunSummary s = train(c);
  EXPECT_EQ(s.step, 12);
  EXPECT_EQ(metrics_rows(c.run.dir), rows);
}

// ---- What is refused.

TEST_F(Training, OtherSettingsInTheSameFolderAreRefusedWithTheDifference) {
  train(config());
  const auto end = checkpoint_contents(checkpoint_path(config().run.dir, 12));
  RunConfig c = config();
  c.optimizer.lr = 0.02;
  c.model.config.hidden_size = 24;
  const std::string text =
      expect_error(ErrorCode::kCheckpoint, {"optimizer.lr", "0.01", "0.02", "model.hidden_size", "16", "24", c.run.dir},
                   [&] { train(c); });
  EXPECT_EQ(text.find("seed"), std::string::npos) << text;
  // The cut into micro-batches is the routing unit of the balance loss, so it decides numbers.
  c = config();
  c.training.micro_batch_size = 4;
  expect_error(ErrorCode::kCheckpoint, {"training.micro_batch_size"}, [&] { train(c); });
  c = config();
  c.model.config.moe_capacity = {2, 2, 2};
  c.training.balance_loss = BalanceLoss::kPerLayer;
  expect_error(ErrorCode::kCheckpoint, {"model.moe_capacity", "training.balance_loss"}, [&] { train(c); });
  EXPECT_EQ(load_run_config(c.run.dir + "/config.yaml", {}).training.micro_batch_size, 2);
  EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 12)), end);
}

TEST_F(Training, ACheckpointOfOtherSettingsIsRefused) {
  train(config());
  RunConfig c = config("other");
  c.run.seed = 5;
  c.run.resume = checkpoint_path(config().run.dir, 6);
  expect_error(ErrorCode::kCheckpoint, {"checkpoint-6", "other settings"}, [&] { train(c); });
  // Another model altogether: the cause, not a list of its tensors.
  c.model.config.hidden_size *= 2;
  const std::string message = error_of(ErrorCode::kCheckpoint, [&] { train(c); });
  EXPECT_NE(message.find("other settings"), std::string::npos) << message;
  EXPECT_LT(message.size(), 400u) << message;
}

TEST_F(Training, FolderInUse) {
  const RunConfig c = config();
  const RunLock other(c.run.dir);
  expect_error(ErrorCode::kCheckpoint, {c.run.dir, std::to_string(::getpid())}, [&] { train(c); });
}

// A mistake in the first start must not bind the folder to the mistake.
TEST_F(Training, BadDataIsRefusedAndMayBeMended) {
  IndexedDatasetWriter empty(work_ / "empty", 40, false);
  empty.finish();
  IndexedDatasetWriter foreign(work_ / "foreign", 5000, false);
  foreign.add_document(std::vector<int32_t>(200, 4000));
  foreign.finish();
  RunConfig c = config();
  for (const auto& [name, part] : {std::pair{"empty", "no tokens"}, {"foreign", "vocabulary"}}) {
    c.data.train = {{work_ / name, 1.0}};
    expect_error(ErrorCode::kData, {work_ / name, part}, [&] { train(c); });
  }
  c.data.train = {{work_ / "nowhere", 1.0}};
  expect_error(ErrorCode::kIo, {work_ / "nowhere"}, [&] { train(c); });
  c = config();
  c.data.valid = {{work_ / "empty", 1.0}};
  expect_error(ErrorCode::kData, {work_ / "empty"}, [&] { train(c); });
  c.data.train.clear();
  expect_error(ErrorCode::kConfig, {"data.train"}, [&] { train(c); });
  EXPECT_EQ(train(config()).step, 12);
}

// ---- Steps that go wrong.

TEST_F(Training, ALossThatIsNotFiniteNamesStepSamplesAndTensor) {
  struct Fault {
    const char* weight;
    const char* first_bad;
  };
  for (const auto& [weight, first_bad] :
       {Fault{"model.layers.0.self_attn.o_proj.weight", "attn_out.0"},
        Fault{"model.layers.1.mlp.gate.weight", "router.1.logits"}, Fault{"model.norm.weight", "final_norm"}}) {
    RunConfig c = config(std::string("bad-") + first_bad);
    ThreadPool pool(1);
    {
      Trainer trainer(c, backend_by_name("cpu"), pool, {});
      ParameterStore& store = trainer.engine().store();
      store.master(store.find(weight)).as<float>()[3] = INFINITY;
      expect_error(ErrorCode::kNumeric, {"step 1", "samples 0 to 3", first_bad, "micro-batch 0"},
                   [&] { trainer.run(); });
    }
    EXPECT_EQ(find_latest(c.run.dir).step, -1);  // what is broken is not saved
  }
}

// The forward pass is fine and a product of gradients overflows: the weight it belongs to is named, also when all that
// the backward pass computes after it becomes NaN.
TEST_F(Training, ABadGradientIsNamed) {
  for (const auto& [down, spreads] : {std::pair{1e30f, false}, {1e37f, true}}) {
    RunConfig c = config(spreads ? "spreads" : "alone");
    ThreadPool pool(1);
    Trainer trainer(c, backend_by_name("cpu"), pool, {});
    ParameterStore& store = trainer.engine().store();
    const auto fill = [&](const char* name, float value) {
      const int i = store.find(name);
      float* w = store.master(i).as<float>();
      std::fill(w, w + store.specs()[static_cast<size_t>(i)].shape.elements(), value);
    };
    fill("model.layers.0.post_attention_layernorm.weight", 1e8f);
    fill("model.layers.0.mlp.up_proj.weight", 0);
    fill("model.layers.0.mlp.down_proj.weight", down);  // times zero
    expect_error(ErrorCode::kNumeric,
                 {"step 1", "samples 0 to 3", "gradient norm",
                  "first bad tensor: gradient of model.layers.0.mlp.up_proj.weight"},
                 [&] { trainer.run(); });
    EXPECT_EQ(all_finite(store.gradient(store.find("model.embed_tokens.weight"))), !spreads);
  }
}

class Spikes : public Training {
 protected:
  // Rows of one token repeated, but the four rows of step 13 are noise.
  RunConfig spiky(const std::string& dir, BadStep what) {
    work_.write_data_with_odd_documents("spiky", 80, 48, 52);
    RunConfig c = config(dir);
    c.data.train = {{work_ / "spiky", 1.0}};
    c.data.valid.clear();
    c.data.shuffle = false;
    c.training.steps = 18;
    c.training.spike_factor = 2;
    c.training.on_bad_loss = what;
    c.optimizer.lr = 0.03;
    c.optimizer.warmup_steps = 0;
    c.checkpoint.every_steps = 1;
    return c;
  }
};

TEST_F(Spikes, Stop) {
  const RunConfig c = spiky("stop", BadStep::kStop);
  expect_error(ErrorCode::kNumeric,
               {"step 13", "samples 48 to 51", "2 times the mean", "none: every activation and gradient is finite"},
               [&] { train(c); });
  EXPECT_EQ(find_latest(c.run.dir).step, 12);
}

TEST_F(Spikes, SkipLeavesTheWeightsAndGoesOn) {
  RunConfig c = spiky("skip", BadStep::kSkip);
  const RunSummary s = train(c);
  EXPECT_EQ(s.step, 18);
  EXPECT_EQ(s.skipped_steps, 1);
  EXPECT_EQ(metrics_values(c.run.dir, "loss").size(), 18u);
  EXPECT_EQ(metrics_values(c.run.dir, "skipped").size(), 1u);
  EXPECT_EQ(checkpoint_contents(checkpoint_path(c.run.dir, 12)), checkpoint_contents(checkpoint_path(c.run.dir, 13)));
  EXPECT_NE(checkpoint_contents(checkpoint_path(c.run.dir, 13)), checkpoint_contents(checkpoint_path(c.run.dir, 14)));
  // Stopped before the spike and gone on: the mean that judges it, and the count, go on as well.
  copy_killed_run("skip", "skip-cut", 11);
  c.run.dir = work_ / "skip-cut";
  EXPECT_EQ(train(c).skipped_steps, 1);
  expect_same_run("skip", "skip-cut", 18);
  copy_killed_run("skip", "skip-late", 15);
  c.run.dir = work_ / "skip-late";
  EXPECT_EQ(train(c).skipped_steps, 1);
}

TEST_F(Training, SkippingForEverEnds) {
  RunConfig c = config();
  c.training.steps = 60;
  c.training.on_bad_loss = BadStep::kSkip;
  ThreadPool pool(1);
  Trainer trainer(c, backend_by_name("cpu"), pool, {});
  ParameterStore& store = trainer.engine().store();
  store.master(store.find("model.norm.weight")).as<float>()[0] = NAN;
  expect_error(ErrorCode::kNumeric, {"step 21", "21 bad steps in a row", "run.resume"}, [&] { trainer.run(); });
  EXPECT_EQ(metrics_values(c.run.dir, "skipped").size(), 20u);
}

// ---- A full disk.

TEST_F(Training, AFullDiskStopsNoTrainingAndTheLastGoodCheckpointStays) {
  train(config("whole"));
  copy_killed_run("whole", "cut", 3);
  const RunConfig c = config("cut");
  {
    const FileSizeLimit limit(20000);  // enough for the records, not for the weights
    const RunSummary s = train(c);
    EXPECT_EQ(s.step, 12);
    EXPECT_NE(s.unsaved, "");  // the command then ends with an error
  }
  EXPECT_EQ(metrics_rows(c.run.dir), metrics_rows(work_ / "whole"));  // it did train
  for (const auto& entry : fs::directory_iterator(c.run.dir)) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
    EXPECT_NE(name, "model");
    EXPECT_TRUE(!name.starts_with("checkpoint-") || name == "checkpoint-3") << name;
  }
  EXPECT_EQ(find_latest(c.run.dir).step, 3);
  const RunSummary mended = train(c);
  EXPECT_EQ(mended.first_step, 4);
  EXPECT_EQ(mended.unsaved, "");
  expect_same_run("whole", "cut", 12);
}

TEST_F(Training, AFullDiskAtTheVeryStartIsAnError) {
  const RunConfig c = config();
  {
    const FileSizeLimit limit(100);
    expect_error(ErrorCode::kIo, {c.run.dir}, [&] { train(c); });
  }
  EXPECT_EQ(train(c).step, 12);
}

// ---- Evaluation and export.

nlohmann::json evaluate(std::vector<std::string> arguments) {
  CLI::App app;
  add_eval_command(app);
  arguments.insert(arguments.begin(), "eval");
  arguments.push_back("--json");
  std::reverse(arguments.begin(), arguments.end());
  ::testing::internal::CaptureStdout();
  try {
    app.parse(arguments);
  } catch (...) {
    EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");  // nothing that looks like a result
    throw;
  }
  std::fflush(stdout);
  return nlohmann::json::parse(::testing::internal::GetCapturedStdout());
}

TEST_F(Training, EvalGivesTheLossThatTrainingWrote) {
  for (const char* dtype : {"f32", "bf16"}) {
    RunConfig c = config(dtype);
    c.training.dtype = dtype;
    train(c);
    const std::vector<double> valid = metrics_values(c.run.dir, "valid_loss");
    const std::string yaml = c.run.dir + "/config.yaml";
    EXPECT_EQ(evaluate({yaml})["loss"].get<double>(), valid[1]) << dtype;
    EXPECT_EQ(evaluate({yaml, "--checkpoint", checkpoint_path(c.run.dir, 6)})["loss"].get<double>(), valid[0]) << dtype;
    // The exported folder, cut into other micro-batches; of a bf16 run it holds the weights that the run computed with.
    const nlohmann::json exported = evaluate({"--model", c.run.dir + "/model", "--data", work_ / "valid",
                                              "--seq-length", "32", "--micro-batch-size", "3", "--dtype", dtype});
    EXPECT_NEAR(exported["loss"].get<double>(), valid[1], c.training.dtype == "f32" ? 1e-6 : 2e-3);
    EXPECT_EQ(exported["tokens"].get<int64_t>(), 9 * 33 - 9);
  }
}

// With a CONFIG, an option that is one of its settings would be ignored.
TEST_F(Training, EvalRefusesWhatAConfigSettles) {
  train(config());
  const std::string yaml = work_ / "run/config.yaml";
  for (const auto& [option, value, setting] :
       std::vector<std::array<std::string, 3>>{{"--max-batches", "2", "--training.eval_batches=2"},
                                               {"--dtype", "f32", "--training.dtype=f32"},
                                               {"--seq-length", "16", "--training.seq_length=16"},
                                               {"--micro-batch-size", "1", "--training.micro_batch_size=1"},
                                               {"--backend", "ref", "backend: ref"}})
    expect_error(ErrorCode::kUsage, {option, setting}, [&] { evaluate({yaml, option, value}); });
}

TEST_F(Training, EvalDoesNotPassOverADamagedRunInSilence) {
  const RunConfig c = config();
  train(c);
  for (const CheckpointInfo& info : list_checkpoints(c.run.dir)) write_text(info.path + "/manifest.json", "{");
  expect_error(ErrorCode::kCheckpoint, {c.run.dir, "no checkpoint of it is whole", "checkpoint-12"},
               [&] { evaluate({c.run.dir + "/config.yaml"}); });
}

// Documents of one token have nothing to predict: no loss is no good loss.
TEST_F(Training, AnEvaluationWithoutATokenIsNoBest) {
  IndexedDatasetWriter writer(work_ / "empty", 40, false);
  for (int i = 0; i < 64; ++i) writer.add_document(std::vector<int32_t>{5});
  writer.finish();
  RunConfig c = config();
  c.data.valid = {{work_ / "empty", 1.0}};
  const RunSummary s = train(c);
  EXPECT_FALSE(s.best_valid_loss);
  EXPECT_TRUE(metrics_values(c.run.dir, "valid_loss").empty());
}

TEST_F(Training, WhatTrainsOnFromAnImportIsAFullCheckpoint) {
  train(config());
  RunConfig c = config("imported");
  import_hf_folder(work_ / "run/model", c.run.dir);
  EXPECT_EQ(train(c).first_step, 1);
  const CheckpointMeta meta = CheckpointReader(find_latest(c.run.dir).path).meta();
  EXPECT_EQ(meta.step, 12);
  EXPECT_FALSE(meta.weights_only);
}

TEST_F(Training, AnOldCheckpointThatStaysIsNoFailedSave) {
  RunConfig c = config();
  c.checkpoint.keep = 1;
  set_io_fault_for_tests([](std::string_view operation, const std::string& path) {
    return operation == "rename" && path.ends_with("/checkpoint-3") ? EPERM : 0;
  });
  const RunSummary s = train(c);
  set_io_fault_for_tests(nullptr);
  EXPECT_TRUE(s.unsaved.empty()) << s.unsaved;
  EXPECT_EQ(find_latest(c.run.dir).step, 12);
}

// A number that means nothing is no result: eval refuses it and names the weights.
TEST_F(Training, EvalRefusesALossThatIsNotFinite) {
  const RunConfig c = config();
  train(c);
  const std::string model = c.run.dir + "/model";
  const auto arguments = [&](const std::string& dir) {
    return std::vector<std::string>{"--model", dir, "--data", work_ / "valid", "--seq-length", "32"};
  };
  for (const char* weight : {"model.norm.weight", "model.layers.1.mlp.experts.0.down_proj.weight"})
    for (const float value : {NAN, INFINITY}) {
      const auto store = load_hf_store(model, c.model.config, DType::kF32, StoreUse::kTrain);
      store->master(store->find(weight)).as<float>()[3] = value;
      const std::string bad = work_ / fmt::format("{}-{}", weight, value);
      export_hf_store(bad, c.model.config, *store, {.dtype = DType::kF32});
      expect_error(ErrorCode::kNumeric, {bad + ": the loss is ", "nan", "concerto checkpoint verify"},
                   [&] { evaluate(arguments(bad)); });
    }
  EXPECT_TRUE(std::isfinite(evaluate(arguments(model))["loss"].get<double>()));
}

TEST_F(Training, StartsFromAnExportedModel) {
  train(config());
  RunConfig c = config("tuned");
  c.model.init = InitFrom::kPretrained;
  c.model.path = work_ / "run/model";
  c.optimizer.warmup_steps = 0;
  train(c);
  const double before = metrics_values(work_ / "run", "loss").back();
  EXPECT_NEAR(metrics_values(c.run.dir, "loss")[0], before, 0.5);
  EXPECT_LT(metrics_values(c.run.dir, "loss")[0], metrics_values(work_ / "run", "loss")[0] - 0.3);
}

}  // namespace
}  // namespace concerto::test
