#include "concerto/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>

#include "concerto/base/hash.h"
#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/manifest.h"

namespace concerto {
namespace {

// The state of a tiny run: two weights, one of them an expert's, and their moments.
struct State {
  std::vector<float> values[6];
  explicit State(float seed) {
    for (int i = 0; i < 6; ++i)
      for (int j = 0; j < 12; ++j) values[i].push_back(seed + static_cast<float>(i * 100 + j));
  }
  std::vector<NamedTensor> tensors() {
    std::vector<NamedTensor> list;
    const std::string_view prefixes[] = {kWeightPrefix, kMoment1Prefix, kMoment2Prefix};
    for (int i = 0; i < 6; ++i) {
      const bool expert = i % 2 == 1;
      list.push_back({std::string(prefixes[i / 2]) + (expert ? "experts.3.w" : "norm"),
                      View(values[i].data(), expert ? Shape{3, 4} : Shape{12}, DType::kF32), expert ? 3 : -1});
    }
    return list;
  }
  bool operator==(const State& o) const {
    for (int i = 0; i < 6; ++i)
      if (values[i] != o.values[i]) return false;
    return true;
  }
};

class CheckpointTest : public testing::Test {
 protected:
  ~CheckpointTest() override { set_io_fault_for_tests(nullptr); }

  static CheckpointMeta meta_of(int64_t step) {
    CheckpointMeta meta;
    meta.step = step;
    meta.samples = step * 64;
    meta.config_hash = "xxh64:0123456789abcdef";
    meta.model_config = "{\"model_type\": \"ernie4_5\"}";
    return meta;
  }
  std::string save(int64_t step, float seed, std::optional<double> valid_loss = std::nullopt) const {
    State state(seed);
    CheckpointMeta meta = meta_of(step);
    meta.valid_loss = valid_loss;
    return save_checkpoint(dir_, meta, state.tensors());
  }
  State load(const std::string& path) const {
    State state(-1);
    CheckpointMeta meta;
    load_checkpoint(path, meta, state.tensors());
    return state;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> result;
    for (const CheckpointInfo& info : list_checkpoints(dir_)) result.push_back(info.step);
    return result;
  }

  const TestFolder folder_;
  const std::string dir_ = folder_ / "run";
};

TEST_F(CheckpointTest, RoundTripOfStateAndMeta) {
  State state(0.1f);
  CheckpointMeta meta = meta_of(7);
  meta.tokenizer = "data/tok\"enizer";
  meta.loss_history = {0.1, 1.0 / 3, INFINITY, -INFINITY, 1e-300};
  meta.valid_loss = 2.0 / 3;
  meta.best_valid_loss = 0.3;
  meta.best_step = 5;
  meta.counters = {{"tokens", 123456789012.0}, {"skipped", 2}};
  const std::string path = save_checkpoint(dir_, meta, state.tensors());
  EXPECT_EQ(path, dir_ + "/checkpoint-7");
  EXPECT_EQ(read_text_file(dir_ + "/latest"), "checkpoint-7\n");
  EXPECT_EQ(list_directory(dir_), (std::vector<std::string>{"checkpoint-7", "latest"}));

  State other(-1);
  CheckpointMeta back;
  load_checkpoint(path, back, other.tensors());
  EXPECT_TRUE(other == state);
  EXPECT_EQ(back.step, 7);
  EXPECT_EQ(back.samples, 448);
  EXPECT_EQ(back.config_hash, meta.config_hash);
  EXPECT_EQ(back.model_config, meta.model_config);
  EXPECT_EQ(back.tokenizer, meta.tokenizer);
  EXPECT_EQ(back.loss_history, meta.loss_history);
  EXPECT_EQ(back.valid_loss, meta.valid_loss);
  EXPECT_EQ(back.best_valid_loss, 0.3);
  EXPECT_EQ(back.best_step, 5);
  EXPECT_EQ(back.counters, meta.counters);
  EXPECT_FALSE(back.weights_only);
}

TEST_F(CheckpointTest, ShardsOfAnySizeHoldTheSame) {
  for (int64_t bytes : {1, 50, 100, 1000}) {
    State state(2);
    const std::string path =
        save_checkpoint(dir_, meta_of(1), state.tensors(), {.max_shard_bytes = bytes, .dtype = {}});
    EXPECT_TRUE(load(path) == state);
    EXPECT_EQ(CheckpointReader(path).file_count(), bytes < 96 ? 6u : bytes == 100 ? 3u : 2u);
  }
}

TEST_F(CheckpointTest, EveryTensorKeepsItsExpertId) {
  const CheckpointReader reader(save(1, 0));
  ASSERT_EQ(reader.tensors().size(), 6u);
  for (const CheckpointTensor& tensor : reader.tensors())
    EXPECT_EQ(tensor.expert, tensor.name.find("experts.3") != std::string::npos ? 3 : -1) << tensor.name;
  EXPECT_EQ(reader.find("weight.other"), nullptr);
}

TEST_F(CheckpointTest, WhatDoesNotFitIsNamedAllAtOnce) {
  const std::string path = save(1, 0);
  State state(9);
  const State before = state;
  std::vector<NamedTensor> tensors = state.tensors();
  tensors[0].name = "weight.other";
  tensors[1].expert = 4;
  tensors[2].view.shape = Shape{6, 2};
  tensors[3].view = View(state.values[3].data(), Shape{3, 4}, DType::kI32);
  CheckpointMeta meta;
  const std::string message = error_of(ErrorCode::kCheckpoint, [&] { load_checkpoint(path, meta, tensors); });
  EXPECT_HAS(message, "5 faults");
  EXPECT_HAS(message, "missing: weight.other");
  EXPECT_HAS(message, "extra: weight.norm");
  EXPECT_HAS(message, "wrong expert: weight.experts.3.w belongs to expert 3, the run wants 4");
  EXPECT_HAS(message, "wrong shape: moment1.norm is [12], the run wants [6, 2]");
  EXPECT_HAS(message, "wrong dtype: moment1.experts.3.w is f32, the run wants i32");
  EXPECT_TRUE(state == before);
  EXPECT_EQ(meta.step, 0);
  // Of another model altogether the first.
  std::vector<float> value(1);
  std::vector<NamedTensor> foreign;
  for (int i = 0; i < 1000; ++i)
    foreign.push_back({fmt::format("weight.{}", i), View(value.data(), Shape{1}, DType::kF32), -1});
  const std::string many = error_of(ErrorCode::kCheckpoint, [&] { load_checkpoint(path, meta, foreign); });
  EXPECT_HAS(many, "1006 faults");
  EXPECT_HAS(many, "... and 956 more");
  EXPECT_LT(std::count(many.begin(), many.end(), '\n'), 60);
  float x[3];
  const CheckpointReader reader(path);
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { reader.read("weight.x", View(x, Shape{3}, DType::kF32)); }),
             "missing");
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { reader.read("weight.norm", View(x, Shape{3}, DType::kF32)); }),
             "shape");
}

TEST_F(CheckpointTest, AWeightsOnlyCheckpointStartsTheOptimizerFromZero) {
  State state(3);
  std::vector<NamedTensor> weights = state.tensors();
  weights.resize(2);
  CheckpointMeta meta = meta_of(0);
  meta.weights_only = true;
  const std::string path = save_checkpoint(dir_, meta, weights);
  const State back = load(path);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(back.values[i], state.values[i]);
  for (int i = 2; i < 6; ++i) EXPECT_EQ(back.values[i], std::vector<float>(12, 0.0f));
  meta.weights_only = false;
  save_checkpoint(dir_, meta, weights);
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { load(path); }), "missing: moment1.norm");
}

// In place, which is much faster than writing the file anew.
void poke(const std::string& file, size_t at, char value) {
  const int fd = ::open(file.c_str(), O_WRONLY);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::pwrite(fd, &value, 1, static_cast<off_t>(at)), 1);
  ::close(fd);
}

TEST_F(CheckpointTest, EveryDamagedByteIsFound) {
  const std::string path = save(1, 0);
  for (const std::string& name : list_directory(path)) {
    const std::string file = path + "/" + name, good = read_text_file(file);
    for (size_t at = 0; at < good.size(); ++at) {
      poke(file, at, static_cast<char>(good[at] ^ (1 << (at % 8))));
      ASSERT_NE(error_of(ErrorCode::kCheckpoint, [&] { CheckpointReader(path).verify(); }), "")
          << name << " byte " << at;
      poke(file, at, good[at]);
    }
  }
  CheckpointReader(path).verify();
}

TEST_F(CheckpointTest, EveryTruncationIsFound) {
  const std::string path = save(1, 0);
  for (const std::string& name : list_directory(path)) {
    const std::string file = path + "/" + name, good = read_text_file(file);
    for (size_t size = good.size(); size-- > 0;) {
      ASSERT_EQ(::truncate(file.c_str(), static_cast<off_t>(size)), 0);
      ASSERT_NE(error_of(ErrorCode::kCheckpoint, [&] { CheckpointReader(path).verify(); }), "")
          << name << " to " << size;
    }
    remove_tree(file);
    ASSERT_NE(error_of(ErrorCode::kCheckpoint, [&] { CheckpointReader(path).verify(); }), "") << name;
    write_file_atomic(file, good);
  }
}

TEST_F(CheckpointTest, LoadingNamesTheDamagedTensor) {
  const std::string path = save(1, 0), file = path + "/weights-00001-of-00001.safetensors";
  std::string text = read_text_file(file);
  text.back() ^= 1;
  write_file_atomic(file, text);
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { load(path); }), "tensor \"weight.experts.3.w\" is damaged");
}

// A manifest with a right hash may still have been made by other hands or another version.
TEST_F(CheckpointTest, OddManifestsAreRefused) {
  const std::string path = save(1, 0), file = path + "/manifest.json", good = read_text_file(file);
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    const size_t hash_at = text.find("xxh64:");
    text.replace(hash_at, 22, "xxh64:0000000000000000");
    text.replace(hash_at, 22, hash_text(hash64(text)));
    write_file_atomic(file, text);
    return error_of(ErrorCode::kCheckpoint, [&] { CheckpointReader(path).check_files(); });
  };
  EXPECT_HAS(edited("\"format\":1", "\"format\":3"), "has format 3, this version reads 1 to 2");
  EXPECT_HAS(edited("\"step\":1", "\"step\":-1"), "\"step\" is not a whole number");
  EXPECT_HAS(edited("\"step\":1", "\"step\":99999999999999999999"), "\"step\" is not a whole number");
  EXPECT_HAS(edited("\"samples\"", "\"sample\""), "has no \"samples\"");
  EXPECT_HAS(edited("\"config_hash\":\"", "\"config_hash\":3,\"x\":\""), "is not a string");
  EXPECT_HAS(edited("\"weights_only\":false", "\"weights_only\":0"), "is not true or false");
  EXPECT_HAS(edited("\"loss_history\":[]", "\"loss_history\":[\"x\"]"), "should be a number");
  EXPECT_HAS(edited("\"loss_history\":[]", "\"loss_history\":3"), "is not a list");
  EXPECT_HAS(edited("\"counters\":{}", "\"counters\":[]"), "is not an object");
  EXPECT_HAS(edited("\"slice\":[[0,12]]", "\"slice\":[[0,6]]"), "\"weight.norm\": is only a part");
  EXPECT_HAS(edited("\"slice\":[[0,12]]", "\"slice\":[]"), "wrong rank");
  EXPECT_HAS(edited("\"shape\":[12]", "\"shape\":[-12]"), "bad shape");
  EXPECT_HAS(edited("\"dtype\":\"F32\"", "\"dtype\":\"F8\""), "unknown dtype \"F8\"");
  EXPECT_HAS(edited("\"dtype\":\"F32\"", "\"dtype\":\"I32\""), "is not there as the manifest says");
  EXPECT_HAS(edited("\"expert\":3", "\"expert\":-3"), "\"expert\" is not a whole number");
  EXPECT_HAS(edited("\"expert\":3", "\"expert\":3000000000"), "bad expert id");
  EXPECT_HAS(edited("\"file\":\"weights-", "\"file\":\"w-"), "not listed");
  EXPECT_HAS(edited("{\"name\":\"weights-", "{\"name\":\"../w-"), "not beside it");
  EXPECT_HAS(edited("{\"name\":\"weights-", "{\"name\":\"w-"), "not listed");
  EXPECT_HAS(edited("\"name\":\"weight.experts.3.w\"", "\"name\":\"weight.norm\""), "\"weight.norm\" twice");
  EXPECT_HAS(edited("\"header_hash\":\"xxh64", "\"header_hash\":\"xxh65"), "is not a hash");
  EXPECT_HAS(edited("\"tensors\":[{", "\"tensors\":[3,{"), "is not an object");
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { parse_manifest("{}", "m"); }), "is not the manifest");
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { CheckpointReader reader(dir_); }), "not a checkpoint");
}

TEST_F(CheckpointTest, LatestIsTheLastSavedWholeOne) {
  EXPECT_EQ(find_latest(dir_).path, "");
  save(10, 1);
  save(20, 2);
  const std::string third = save(30, 3);
  EXPECT_EQ(find_latest(dir_).step, 30);
  std::string text = read_text_file(third + "/optimizer-00001-of-00001.safetensors");
  text[text.size() - 3] ^= 4;
  write_file_atomic(third + "/optimizer-00001-of-00001.safetensors", text);
  make_directories(dir_ + "/checkpoint-40.tmp");
  make_directories(dir_ + "/checkpoint-x");
  const LatestCheckpoint latest = find_latest(dir_);
  EXPECT_EQ(latest.path, dir_ + "/checkpoint-20");
  ASSERT_EQ(latest.skipped.size(), 1u);
  EXPECT_HAS(latest.skipped[0], "checkpoint-30");
  EXPECT_HAS(latest.skipped[0], "is damaged");
  // The run goes back to step 10 and saves again: that is now the latest, though step 20 is still there.
  save(15, 4);
  EXPECT_EQ(find_latest(dir_).step, 15);
  EXPECT_EQ(steps(), (std::vector<int64_t>{10, 15, 20, 30}));
}

TEST_F(CheckpointTest, SavingTheSameStepAgainReplacesIt) {
  save(5, 1);
  const std::string path = save(5, 2);
  EXPECT_TRUE(load(path) == State(2));
  EXPECT_EQ(list_directory(dir_), (std::vector<std::string>{"checkpoint-5", "latest"}));
}

TEST_F(CheckpointTest, KeepsTheLastAndTheBest) {
  save(1, 1, 3.0);
  save(2, 1, 2.0);
  save(3, 1, NAN);
  save(4, 1, 2.5);
  save(5, 1);
  save(6, 1, 2.2);
  make_directories(dir_ + "/checkpoint-7.tmp");
  const std::vector<std::string> removed = remove_old_checkpoints(dir_, 2, true);
  EXPECT_EQ(removed.size(), 3u);
  EXPECT_EQ(steps(), (std::vector<int64_t>{2, 5, 6}));
  EXPECT_FALSE(path_exists(dir_ + "/checkpoint-7.tmp"));
  remove_old_checkpoints(dir_, 2, false);
  EXPECT_EQ(steps(), (std::vector<int64_t>{5, 6}));
  EXPECT_TRUE(remove_old_checkpoints(dir_, 2, false).empty());
}

TEST_F(CheckpointTest, DamagedOnesDoNotCountAndStay) {
  save(1, 1);
  save(2, 1);
  const std::string third = save(3, 1);
  remove_tree(third + "/config.json");
  remove_old_checkpoints(dir_, 1, true);
  EXPECT_EQ(steps(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(list_checkpoints(dir_)[0].fault, "");
  EXPECT_HAS(list_checkpoints(dir_)[1].fault, "config.json: is missing");
}

// Every system call of a save fails in turn: the older checkpoint and `latest` stay, and nothing half written is left.
TEST_F(CheckpointTest, AFailedSaveLeavesTheOldState) {
  save(1, 1);
  int calls = 0;
  set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls, 0; });
  save(2, 2);
  const int total = calls;
  ASSERT_GT(total, 25);
  for (int fail = 1; fail <= total; ++fail) {
    set_io_fault_for_tests(nullptr);
    remove_tree(dir_ + "/checkpoint-2");
    FileWriter(dir_ + "/latest").write("checkpoint-1\n", 13);
    calls = 0;
    bool renamed = false;
    set_io_fault_for_tests([&](std::string_view operation, const std::string& path) {
      if (++calls == fail) return fail % 2 ? ENOSPC : EIO;
      renamed |= operation == "rename" && path.ends_with("checkpoint-2.concerto.tmp");
      return 0;
    });
    error_of(ErrorCode::kIo, [&] { save(2, 2); });
    set_io_fault_for_tests(nullptr);
    std::vector<std::string> expected{"checkpoint-1", "latest"};
    if (renamed) expected.insert(expected.begin() + 1, "checkpoint-2");  // it was whole; only `latest` was not told
    EXPECT_EQ(list_directory(dir_), expected) << "call " << fail;
    if (!renamed) {
      EXPECT_EQ(read_text_file(dir_ + "/latest"), "checkpoint-1\n");
    }
    EXPECT_TRUE(load(dir_ + "/checkpoint-1") == State(1));
    EXPECT_EQ(find_latest(dir_).step, renamed ? 2 : 1);
  }
}

TEST_F(CheckpointTest, AFullDiskIsAnErrorAndTheRunGoesOn) {
  save(1, 1);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{300, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = error_of(ErrorCode::kIo, [&] { save(2, 2); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_HAS(message, "Free space");
  EXPECT_EQ(list_directory(dir_), (std::vector<std::string>{"checkpoint-1", "latest"}));
  save(3, 3);
  EXPECT_EQ(find_latest(dir_).step, 3);
}

TEST_F(CheckpointTest, AProcessKilledAnywhereInASaveLosesAtMostThatSave) {
  int calls = 0;
  set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls, 0; });
  save(1, 1);
  const int total = calls;
  set_io_fault_for_tests(nullptr);
  for (int at = 1; at <= total; at += 2) {
    remove_tree(dir_ + "/checkpoint-2");
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int n = 0;
      set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++n == at ? raise(SIGKILL) : 0; });
      save(2, 2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    const LatestCheckpoint latest = find_latest(dir_);
    ASSERT_TRUE(latest.skipped.empty());
    EXPECT_TRUE(load(latest.path) == State(static_cast<float>(latest.step))) << at;
  }
  save(2, 2);  // what the crash left is no obstacle
  EXPECT_EQ(find_latest(dir_).step, 2);
}

}  // namespace
}  // namespace concerto
