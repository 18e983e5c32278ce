// Saves and loads of many ranks that go wrong: the same Error on every rank, no hang, nothing half written is taken for
// whole.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>

#include "concerto/base/hash.h"
#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/hf_folder.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/test_layouts.h"
#include "concerto/comm/local/local_world.h"

namespace concerto {
namespace {

using Names = std::vector<std::string>;

class ShardedFailures : public testing::Test {
 protected:
  ~ShardedFailures() override { set_io_fault_for_tests(nullptr); }

  CheckpointMeta meta_of(int64_t step) const {
    CheckpointMeta meta;
    meta.step = step;
    meta.model_config = model_config_json(model_, "float32");
    return meta;
  }
  // What each rank's `body` ends with: the text of its Error, or "".
  template <class Body>
  std::vector<std::string> errors_of(const TestLayout& layout, ErrorCode code, Body&& body) const {
    std::vector<std::string> errors(static_cast<size_t>(layout.mesh.world()));
    run_local_ranks(layout.mesh.world(), [&](Communicator& world) {
      RankState state(model_, layout, world.rank());
      state.fill();
      try {
        body(world, state);
      } catch (const Error& e) {
        EXPECT_EQ(error_code_name(e.code), std::string(error_code_name(code))) << e.what();
        errors[static_cast<size_t>(world.rank())] = e.what();
      }
    });
    return errors;
  }
  // The one text that all ranks end with.
  template <class Body>
  std::string error_of_all(const TestLayout& layout, ErrorCode code, Body&& body) const {
    const std::vector<std::string> errors = errors_of(layout, code, body);
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    EXPECT_NE(errors[0], "");
    return errors[0];
  }
  std::string save(Communicator& world, RankState& state, int64_t step = 1, bool check_model = true) const {
    SaveOptions options;
    options.world = &world;
    if (check_model) options.model = &model_;
    return save_checkpoint(dir_, meta_of(step), state.tensors(), options);
  }
  void save_all(const TestLayout& layout, int64_t step = 1) const {
    errors_of(layout, ErrorCode::kIo, [&](Communicator& world, RankState& state) { save(world, state, step); });
  }
  std::string load_error(const TestLayout& layout, const std::string& path) const {
    return error_of_all(layout, ErrorCode::kCheckpoint, [&](Communicator& world, RankState& state) {
      CheckpointMeta meta;
      load_checkpoint(path, meta, state.tensors(), &world);
    });
  }
  // What a save without the model's list of tensors says, and with it.
  template <class Change>
  std::string save_error(Change&& change, bool check_model = false) const {
    const std::string error = error_of_all(two_, ErrorCode::kCheckpoint, [&](Communicator& world, RankState& state) {
      change(world.rank(), state.tensors());
      save(world, state, 1, check_model);
    });
    EXPECT_FALSE(path_exists(dir_)) << "nothing is written before the shards are known to be right";
    return error;
  }

  const TestFolder folder_;
  const std::string dir_ = folder_ / "run";
  const ModelConfig model_ = layout_model();
  const TestLayout one_{"one", {}}, two_{"tp2", {.tp = 2}}, tp3_{"tp3", {.tp = 3}}, ep4_ = test_layouts()[3];
};

NamedTensor& find(std::vector<NamedTensor>& tensors, const std::string& name) {
  for (NamedTensor& t : tensors)
    if (t.name == name) return t;
  throw Bug(name + " is not here");
}

const std::string kExpert = "weight.model.layers.1.mlp.experts.5.up_proj.weight";
const std::string kCut = "moment1.model.layers.0.mlp.up_proj.weight";  // [17, 24] in two of 8 and 9 rows

TEST_F(ShardedFailures, AnExpertThatTwoRanksOwnIsNamed) {
  const std::string error =
      save_error([](int, std::vector<NamedTensor>& tensors) { find(tensors, kExpert).owned = true; });
  EXPECT_HAS(error, "the shards of 2 ranks");
  EXPECT_HAS(error, "(1 fault)");
  EXPECT_HAS(error, "twice: " + kExpert);
  EXPECT_HAS(error, "in rank 0 and ");
  EXPECT_HAS(error, "in rank 1");
}

TEST_F(ShardedFailures, WhatNobodyWritesIsNamed) {
  // Somebody has it ...
  EXPECT_HAS(save_error([](int, std::vector<NamedTensor>& tensors) { find(tensors, kExpert).owned = false; }),
             "missing: " + kExpert + " [5, 24]: rank 0 has it, and nobody owns it");
  EXPECT_HAS(save_error([](int rank, std::vector<NamedTensor>& tensors) { find(tensors, kCut).owned = rank == 0; }),
             "missing: " + kCut + " [8:17] of dim 0");
  // ... or nobody has: only the model knows that it should be there.
  const auto forget = [](const std::string& name) {
    return [name](int, std::vector<NamedTensor>& tensors) {
      std::erase_if(tensors, [&](const NamedTensor& t) { return t.name.find(name) != std::string::npos; });
    };
  };
  const std::string lost = save_error(forget(".experts.5."), true);
  EXPECT_HAS(lost, "missing: " + kExpert);
  EXPECT_HAS(lost, "(27 faults)");  // three matrices of three layers, and their moments
  const std::string moments = save_error(forget("moment2.model.norm.weight"), true);
  EXPECT_HAS(moments, "missing: moment2.model.norm.weight [24]");
  EXPECT_HAS(moments, "255864 bytes of 255960");
}

TEST_F(ShardedFailures, SlicesThatContradictEachOtherAreNamed) {
  EXPECT_HAS(save_error([](int rank, std::vector<NamedTensor>& tensors) {
               if (rank == 1) find(tensors, kCut).cut_begin = 7;
             }),
             "twice: " + kCut + " [0:8, 0:24] in rank 0 and [7:16, 0:24] in rank 1");
  EXPECT_HAS(save_error([](int rank, std::vector<NamedTensor>& tensors) {
               if (rank == 1) find(tensors, kCut).full_shape = Shape{18, 24};
             }),
             "contradiction: " + kCut);
  EXPECT_HAS(save_error([](int rank, std::vector<NamedTensor>& tensors) {
               if (rank == 0) return;
               NamedTensor& t = find(tensors, kCut);
               t.view = View(t.view.data, Shape{17, 12}, DType::kF32);
               t.cut_dim = 1;
             }),
             "cut in two dims: " + kCut);
  EXPECT_HAS(save_error([](int, std::vector<NamedTensor>& tensors) { find(tensors, kExpert).expert = 4; }, true),
             "wrong expert: " + kExpert + " belongs to expert 4, the model wants 5");
  EXPECT_HAS(save_error([](int, std::vector<NamedTensor>& tensors) { find(tensors, kExpert).name += "x"; }, true),
             "extra: " + kExpert + "x");
}

TEST_F(ShardedFailures, ATensorListedTwiceByARankIsABug) {
  std::atomic<int> bugs = 0, others = 0;
  EXPECT_THROW(run_local_ranks(2,
                               [&](Communicator& world) {
                                 RankState state(model_, two_, world.rank());
                                 if (world.rank() == 1) state.tensors().push_back(state.tensors()[0]);
                                 try {
                                   save(world, state);
                                 } catch (const Bug&) {
                                   ++bugs;
                                   throw;
                                 } catch (const Error& e) {
                                   EXPECT_HAS(std::string(e.what()), "rank 1");
                                   ++others;
                                 }
                               }),
               Bug);
  EXPECT_EQ(bugs, 1);
  EXPECT_EQ(others, 1);
}

TEST_F(ShardedFailures, APlanOfOtherTensorsIsABug) {
  std::atomic<int> bugs = 0;
  run_local_ranks(2, [&](Communicator& world) {
    RankState state(model_, two_, world.rank());
    SavePlan plan;
    SaveOptions options;
    options.world = &world;
    options.plan = &plan;
    save_checkpoint(dir_, meta_of(1), state.tensors(), options);
    find(state.tensors(), kExpert).expert = 4;
    try {
      save_checkpoint(dir_, meta_of(2), state.tensors(), options);
    } catch (const Bug&) {
      ++bugs;
    }
  });
  EXPECT_EQ(bugs, 2);
  EXPECT_EQ(list_directory(dir_), (Names{"checkpoint-1", "latest"}));
}

TEST_F(ShardedFailures, ALostFileIsNamedOnEveryRank) {
  save_all(tp3_);
  const std::string path = dir_ + "/checkpoint-1";
  remove_tree(path + "/weights-00002-of-00003.safetensors");
  for (const TestLayout& layout : {one_, tp3_, ep4_})
    EXPECT_HAS(load_error(layout, path), "weights-00002-of-00003.safetensors: is missing");
  EXPECT_HAS(load_error(tp3_, folder_ / "none"), "not a checkpoint");
}

TEST_F(ShardedFailures, AForeignFileIsNamed) {
  save_all(tp3_, 1);
  save_all(tp3_, 2);
  const std::string path = dir_ + "/checkpoint-2", file = "/weights-00002-of-00003.safetensors";
  write_file_atomic(path + file, read_text_file(dir_ + "/checkpoint-1" + file));
  EXPECT_HAS(load_error(two_, path), "is of another checkpoint: of step 1, where this one is of 2");
  // Of the same step, but of another rank.
  write_file_atomic(path + file, read_text_file(path + "/weights-00003-of-00003.safetensors"));
  EXPECT_HAS(load_error(two_, path), "is damaged or of another checkpoint");
}

TEST_F(ShardedFailures, ATruncatedOrDamagedFileIsNamedByWhoeverReadsIt) {
  save_all(tp3_);
  const std::string path = dir_ + "/checkpoint-1", file = path + "/optimizer-00003-of-00003.safetensors";
  const std::string good = read_text_file(file);
  write_file_atomic(file, good.substr(0, good.size() - 5));
  EXPECT_HAS(load_error(ep4_, path), "optimizer-00003-of-00003.safetensors");
  // Every slice is checked, also those that no rank reads whole: tp2 cuts what tp3 has cut in other places.
  const SafetensorsFile whole(path + "/optimizer-00001-of-00003.safetensors");
  for (const TestLayout& layout : {one_, two_, tp3_, ep4_}) {
    int tried = 0;
    for (size_t at = good.size(); at > good.size() - 4000; at -= 800) {
      std::string bad = good;
      bad[at - 1] ^= 16;
      write_file_atomic(file, bad);
      EXPECT_HAS(load_error(layout, path), "is damaged: its hash does not match the manifest");
      const std::vector<std::string> none =
          errors_of(layout, ErrorCode::kCheckpoint, [&](Communicator& world, RankState&) {
            const LatestCheckpoint latest = find_latest(dir_, &world);
            EXPECT_EQ(latest.path, "");
            ASSERT_EQ(latest.skipped.size(), 1u);
            EXPECT_HAS(latest.skipped[0], "is damaged");
          });
      EXPECT_EQ(none[0], "");
      ++tried;
    }
    EXPECT_GE(tried, 5);
  }
}

TEST_F(ShardedFailures, AManifestWithSlicesThatAreNoTensorIsRefused) {
  save_all(two_);
  const std::string path = dir_ + "/checkpoint-1", file = path + "/manifest.json", good = read_text_file(file);
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::string entry = "{\"name\":\"" + kCut;
    const size_t tensor = from.starts_with("[[8") ? text.rfind(entry) : text.find(entry), at = text.find(from, tensor);
    EXPECT_TRUE(tensor != std::string::npos && at != std::string::npos) << from;
    text.replace(at, from.size(), to);
    const size_t hash_at = text.find("xxh64:");
    text.replace(hash_at, 22, "xxh64:0000000000000000");
    text.replace(hash_at, 22, hash_text(hash64(text)));
    write_file_atomic(file, text);
    return load_error(two_, path);
  };
  EXPECT_HAS(edited("[[0,8],", "[[0,9],"), "twice: " + kCut + " [0:9, 0:24] in optimizer-00001-of-00002.safetensors");
  EXPECT_HAS(edited("[[0,8],", "[[0,7],"), "missing: " + kCut + " [7:8] of dim 0");
  EXPECT_HAS(edited("[[8,17],", "[[8,16],"), "missing: " + kCut + " [16:17] of dim 0");
  EXPECT_HAS(edited("[[8,17],", "[[8,18],"), "has the slice [8, 18] of a dim of 17");
  EXPECT_HAS(edited("[[8,17],", "[[8],"), "has a slice that is not a list of [begin, end]");
  EXPECT_HAS(edited("[[8,17],[0,24]", "[[8,17],[0,23]"), "cut in two dims: " + kCut);
  EXPECT_HAS(edited("\"F32\"", "\"I32\""), "contradiction: " + kCut + " is [17, 24] f32");
}

TEST_F(ShardedFailures, WhatDoesNotFitTheRunIsNamedOnEveryRank) {
  save_all(ep4_);
  const std::string path = dir_ + "/checkpoint-1";
  const auto load = [&](const std::function<void(int, std::vector<NamedTensor>&)>& change) {
    return error_of_all(two_, ErrorCode::kCheckpoint, [&](Communicator& world, RankState& state) {
      change(world.rank(), state.tensors());
      CheckpointMeta meta;
      load_checkpoint(path, meta, state.tensors(), &world);
    });
  };
  EXPECT_HAS(load([](int rank, std::vector<NamedTensor>& tensors) {
               if (rank == 1) find(tensors, kExpert).name += "x";
             }),
             "rank 1: " + path + ": does not fit this run (1 fault):\n  missing: " + kExpert + "x [5, 24]");
  EXPECT_HAS(load([](int, std::vector<NamedTensor>& tensors) {
               std::erase_if(tensors, [](const NamedTensor& t) { return t.name == kExpert; });
             }),
             "extra: " + kExpert);
  EXPECT_HAS(load([](int rank, std::vector<NamedTensor>& tensors) {
               if (rank == 0) find(tensors, kExpert).expert = 6;
             }),
             "wrong expert: " + kExpert);
}

// Each rank in turn has a full disk, at its first, a middle and its last write: nobody saves, nobody hangs.
TEST_F(ShardedFailures, AFullDiskOnOneRankCallsOffTheSaveOnAll) {
  save_all(tp3_, 1);
  for (const char* file : {"weights-00001", "weights-00002", "optimizer-00003", "config.json", "manifest.json"})
    for (const int at : {1, 3}) {
      std::atomic<int> writes = 0;
      const bool small = std::string(file).ends_with(".json");
      set_io_fault_for_tests([&](std::string_view operation, const std::string& path) {
        if (operation != (small ? "open" : "write") ||
            path.find("checkpoint-2.concerto.tmp/" + std::string(file)) == std::string::npos)
          return 0;
        return small || ++writes == at ? ENOSPC : 0;
      });
      const std::string error =
          error_of_all(tp3_, ErrorCode::kIo, [&](Communicator& world, RankState& state) { save(world, state, 2); });
      set_io_fault_for_tests(nullptr);
      EXPECT_HAS(error, "No space left on device");
      EXPECT_HAS(error, file);
      EXPECT_HAS(error, "Free space");
      if (!small) {
        EXPECT_HAS(error, fmt::format("rank {}: ", file[std::string(file).size() - 1] - '1'));
      }
      EXPECT_EQ(list_directory(dir_), (Names{"checkpoint-1", "latest"})) << file;
    }
  // The run goes on, and a later save succeeds.
  save_all(tp3_, 3);
  EXPECT_EQ(find_latest(dir_).step, 3);
}

TEST_F(ShardedFailures, AFileThatTheSystemRefusesCallsOffTheSave) {
  save_all(ep4_, 1);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{20000, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error =
      error_of_all(ep4_, ErrorCode::kIo, [&](Communicator& world, RankState& state) { save(world, state, 2); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_HAS(error, "cannot write: File too large");
  EXPECT_EQ(list_directory(dir_), (Names{"checkpoint-1", "latest"}));
}

TEST_F(ShardedFailures, ARankThatThrowsInASaveCallsItOff) {
  save_all(tp3_, 1);
  std::vector<std::string> ends(3);
  run_local_ranks(3, [&](Communicator& world) {
    RankState state(model_, tp3_, world.rank());
    SaveOptions options;
    options.world = &world;
    options.progress = [&](int64_t done, int64_t) {
      if (world.rank() == 2 && done == 5) throw std::runtime_error("out of paper");
    };
    try {
      save_checkpoint(dir_, meta_of(2), state.tensors(), options);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kIo);
      ends[static_cast<size_t>(world.rank())] = e.what();
    } catch (const std::runtime_error& e) {
      ends[static_cast<size_t>(world.rank())] = std::string("its own: ") + e.what();
    }
    world.barrier();  // the world still works
    EXPECT_EQ(list_directory(dir_), (Names{"checkpoint-1", "latest"}));
  });
  EXPECT_HAS(ends[0], "rank 2: out of paper");
  EXPECT_EQ(ends[1], ends[0]);
  EXPECT_EQ(ends[2], "its own: out of paper");
}

// A rank that is gone before it has written, or before it hears the verdict.
TEST_F(ShardedFailures, ARankThatLeavesEndsTheOthersAndLeavesNothing) {
  save_all(tp3_, 1);
  for (const int quitter : {0, 2}) {
    std::atomic<int> ended = 0;
    EXPECT_THROW(run_local_ranks(3,
                                 [&](Communicator& world) {
                                   RankState state(model_, tp3_, world.rank());
                                   SavePlan plan;
                                   SaveOptions options;
                                   options.world = &world;
                                   options.plan = &plan;
                                   try {
                                     save_checkpoint(dir_, meta_of(1), state.tensors(), options);
                                     if (world.rank() == quitter) throw std::runtime_error("gone");
                                     save_checkpoint(dir_, meta_of(2), state.tensors(), options);
                                   } catch (const Error& e) {
                                     EXPECT_EQ(e.code, ErrorCode::kComm) << e.what();
                                     ++ended;
                                     throw;
                                   }
                                 }),
                 std::exception);
    EXPECT_EQ(ended, 2);
    EXPECT_EQ(list_directory(dir_), (Names{"checkpoint-1", "latest"}));
  }
}

TEST_F(ShardedFailures, AJobKilledAnywhereInASaveLosesAtMostThatSave) {
  save_all(tp3_, 1);
  std::atomic<int> calls = 0;
  set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls, 0; });
  save_all(tp3_, 1);
  const int total = calls;
  set_io_fault_for_tests(nullptr);
  ASSERT_GT(total, 50);
  for (int at = 1; at <= total; at += total / 9) {
    remove_tree(dir_ + "/checkpoint-2");
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::atomic<int> n = 0;
      set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++n == at ? raise(SIGKILL) : 0; });
      save_all(tp3_, 2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const LatestCheckpoint latest = find_latest(dir_);
    ASSERT_TRUE(latest.skipped.empty()) << latest.skipped[0];
    ASSERT_GE(latest.step, 1);
    RankState state(model_, one_, 0);
    CheckpointMeta meta;
    load_checkpoint(latest.path, meta, state.tensors());
    EXPECT_EQ(state.wrong(), "") << at;
  }
  save_all(tp3_, 2);  // what the crash left is no obstacle
  EXPECT_EQ(find_latest(dir_).step, 2);
}

TEST_F(ShardedFailures, AFailedExportLeavesNothingOnAnyRank) {
  const std::string out = folder_ / "hf";
  const auto export_error = [&](ErrorCode code, const std::function<void(RankState&)>& change) {
    return error_of_all(tp3_, code, [&](Communicator& world, RankState& state) {
      std::erase_if(state.tensors(), [](const NamedTensor& t) { return !t.name.starts_with(kWeightPrefix); });
      change(state);
      write_hf_slices(
          out, model_, state.tensors(), [](const NamedTensor& t) { return t.view; },
          {.dtype = DType::kBF16, .copy_files = {}}, &world);
    });
  };
  set_io_fault_for_tests([](std::string_view operation, const std::string& path) {
    static std::atomic<int> writes;
    return operation == "write" && path.ends_with("model.safetensors") && ++writes == 60 ? EIO : 0;
  });
  EXPECT_HAS(export_error(ErrorCode::kIo, [](RankState&) {}), "model.safetensors: cannot write");
  set_io_fault_for_tests(nullptr);
  EXPECT_EQ(list_directory(folder_.path()), Names{});
  EXPECT_HAS(
      export_error(ErrorCode::kCheckpoint, [](RankState& state) { find(state.tensors(), kExpert).owned = false; }),
      "missing: " + kExpert);
  make_directories(out);
  EXPECT_HAS(export_error(ErrorCode::kIo, [](RankState&) {}), "exists already");
  EXPECT_EQ(list_directory(folder_.path()), Names{"hf"});
}

}  // namespace
}  // namespace concerto
