// Checkpoints and exports of every layout are those of every other.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "concerto/base/hash.h"
#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/hf_convert.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/checkpoint/test_layouts.h"
#include "concerto/comm/local/local_world.h"

namespace concerto {
namespace {

CheckpointMeta meta_of(int64_t step, const ModelConfig& model) {
  CheckpointMeta meta;
  meta.step = step;
  meta.samples = step * 8;
  meta.counters["tokens"] = 5;
  meta.model_config = model_config_json(model, "float32");
  return meta;
}

std::map<std::string, uint64_t> hashes_of(const std::string& path) {
  const CheckpointReader reader(path);
  reader.verify();
  std::map<std::string, uint64_t> hashes;
  for (const CheckpointTensor& tensor : reader.tensors()) hashes[tensor.name] = reader.tensor_hash(tensor);
  return hashes;
}

int64_t bytes_of_files(const std::string& path) {
  const CheckpointReader reader(path);
  int64_t bytes = 0;
  for (size_t i = 0; i < reader.file_count(); ++i) {
    const SafetensorsFile file(path + "/" + reader.file_name(i));
    for (const SafetensorsEntry& entry : file.entries()) bytes += entry.bytes;
  }
  return bytes;
}

class ShardedCheckpoint : public testing::Test {
 protected:
  void save(const TestLayout& layout, const std::string& dir, int64_t max_shard_bytes = 1 << 20) const {
    run_local_ranks(layout.mesh.world(), [&](Communicator& world) {
      RankState state(model_, layout, world.rank());
      state.fill();
      SaveOptions options;
      options.world = &world;
      options.model = &model_;
      options.max_shard_bytes = max_shard_bytes;
      EXPECT_EQ(save_checkpoint(dir, meta_of(3, model_), state.tensors(), options), dir + "/checkpoint-3");
    });
  }

  const TestFolder folder_;
  const ModelConfig model_ = layout_model();
};

class FromLayout : public ShardedCheckpoint, public testing::WithParamInterface<size_t> {};

TEST_P(FromLayout, EveryLayoutLoadsItAndSavesTheSame) {
  const std::vector<TestLayout> layouts = test_layouts();
  const TestLayout& a = layouts[GetParam()];
  const std::string from = folder_ / a.name, path = from + "/checkpoint-3";
  save(layouts[0], folder_ / "whole");
  const std::map<std::string, uint64_t> expected = hashes_of(folder_ / "whole/checkpoint-3");
  save(a, from);
  ASSERT_EQ(hashes_of(path), expected);
  for (const TestLayout& b : layouts) {
    const std::string to = folder_ / ("to-" + b.name);
    run_local_ranks(b.mesh.world(), [&](Communicator& world) {
      RankState state(model_, b, world.rank());
      state.poison();
      CheckpointMeta meta;
      const LatestCheckpoint latest = find_latest(from, &world);
      EXPECT_EQ(latest.step, 3);
      load_checkpoint(latest.path, meta, state.tensors(), &world);
      EXPECT_EQ(state.wrong(), "") << "into " << b.name << ", rank " << world.rank();
      EXPECT_EQ(meta.samples, 24);
      SaveOptions options;
      options.world = &world;
      save_checkpoint(to, meta, state.tensors(), options);
    });
    ASSERT_EQ(hashes_of(to + "/checkpoint-3"), expected) << "into " << b.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, FromLayout, testing::Range<size_t>(0, test_layouts().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           std::string name = test_layouts()[info.param].name;
                           std::erase(name, '-');
                           return name;
                         });

TEST_F(ShardedCheckpoint, EverySliceIsWrittenOnce) {
  int64_t expected = 0;
  for (const TensorSpec& spec : tensor_specs(model_)) expected += spec.shape.elements() * (spec.trainable ? 12 : 4);
  for (const TestLayout& layout : test_layouts()) {
    const std::string dir = folder_ / layout.name, path = dir + "/checkpoint-3";
    save(layout, dir, 50000);
    EXPECT_EQ(bytes_of_files(path), expected) << layout.name;
    std::map<int, std::set<std::string>> experts;
    const CheckpointReader reader(path);
    for (const CheckpointTensor& tensor : reader.tensors())
      if (tensor.expert >= 0) experts[tensor.expert].insert(tensor.name);
    EXPECT_EQ(experts.size(), 7u);
    for (const auto& [id, names] : experts) EXPECT_EQ(names.size(), experts[0].size()) << id;
    // Only what is cut needs the newer format.
    const bool cut = std::any_of(reader.tensors().begin(), reader.tensors().end(),
                                 [](const CheckpointTensor& t) { return t.slices.size() > 1; });
    EXPECT_EQ(cut, layout.mesh.tp > 1 || layout.mesh.etp > 1) << layout.name;
    EXPECT_HAS(read_text_file(path + "/manifest.json").substr(0, 80), cut ? "\"format\":2" : "\"format\":1");
  }
}

TEST_F(ShardedCheckpoint, ReshardGivesOneRanksFiles) {
  save({"one", {}}, folder_ / "one", 20000);
  for (const TestLayout& layout : test_layouts()) {
    const std::string dir = folder_ / layout.name, out = folder_ / (layout.name + "-whole");
    if (layout.name != "one") save(layout, dir);
    const std::string path = reshard_checkpoint(CheckpointReader(dir + "/checkpoint-3"), out, 20000);
    EXPECT_EQ(path, out + "/checkpoint-3");
    EXPECT_EQ(find_latest(out).step, 3);
    EXPECT_EQ(hashes_of(path), hashes_of(folder_ / "one/checkpoint-3"));
    const CheckpointReader whole(path);
    EXPECT_GT(whole.file_count(), 4u);
    for (const CheckpointTensor& tensor : whole.tensors()) EXPECT_EQ(tensor.slices.size(), 1u);
    EXPECT_HAS(error_of(ErrorCode::kIo, [&] { reshard_checkpoint(whole, out, 100); }), "exists already");
  }
}

TEST_F(ShardedCheckpoint, AnImportedModelStartsTheOptimizerFromZeroOnAllRanks) {
  const TestLayout layout = test_layouts()[7];
  run_local_ranks(layout.mesh.world(), [&](Communicator& world) {
    RankState state(model_, layout, world.rank());
    state.fill();
    std::vector<NamedTensor> weights;
    for (const NamedTensor& t : state.tensors())
      if (t.name.starts_with(kWeightPrefix)) weights.push_back(t);
    CheckpointMeta meta = meta_of(0, model_);
    meta.weights_only = true;
    SaveOptions options;
    options.world = &world;
    options.model = &model_;
    const std::string path = save_checkpoint(folder_ / "run", meta, weights, options);
    state.poison();
    load_checkpoint(path, meta, state.tensors(), &world);
    for (const NamedTensor& t : state.tensors())
      for (int64_t i = 0; i < t.view.elements(); ++i) {
        const float value = t.view.as<float>()[i];
        ASSERT_EQ(value != 0, t.name.starts_with(kWeightPrefix) && value != 0) << t.name;
      }
  });
}

// The same bytes, whoever writes them: a store on one rank, the ranks of any layout, or a checkpoint.
TEST_F(ShardedCheckpoint, ExportsOfAllLayoutsAreEqual) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const HfExport options{.dtype = dtype, .max_shard_bytes = 20000, .copy_files = {}};
    const auto source = [&](std::vector<float>& values) {
      return [&](const TensorSpec& spec) {
        values.clear();
        for (int64_t i = 0; i < spec.shape.elements(); ++i)
          values.push_back(element_of(std::string(kWeightPrefix) + spec.name, i));
        return View(values.data(), spec.shape, DType::kF32);
      };
    };
    std::vector<float> values;
    const std::string one = folder_ / fmt::format("hf-{}", dtype_name(dtype));
    write_hf_folder(one, model_, source(values), options);
    const std::vector<std::string> files = list_directory(one);
    ASSERT_GT(files.size(), 4u);
    const auto expect_equal = [&](const std::string& dir) {
      ASSERT_EQ(list_directory(dir), files);
      for (const std::string& file : files)
        EXPECT_EQ(read_text_file(dir + "/" + file), read_text_file(one + "/" + file)) << dir << " " << file;
    };
    for (const TestLayout& layout : test_layouts()) {
      const std::string dir = folder_ / fmt::format("{}-{}", layout.name, dtype_name(dtype));
      run_local_ranks(layout.mesh.world(), [&](Communicator& world) {
        const std::vector<TensorSpec> specs = tensor_specs(model_, layout.plan(world.rank()));
        ParameterStore store(specs, DType::kF32, StoreUse::kTrain);
        RankState state(model_, layout, world.rank());
        state.fill();
        std::vector<uint8_t> owned;
        for (const TensorSpec& spec : specs) {
          const NamedTensor& tensor = state.find(std::string(kWeightPrefix) + spec.name);
          owned.push_back(tensor.owned);
          store.set(store.find(spec.name), tensor.view.as<float>());
        }
        export_hf_store(dir, model_, store, options, &world, owned);
        // And back, each rank its part.
        ParameterStore again(specs, DType::kF32, StoreUse::kTrain);
        load_hf_weights(dir, model_, again);
        if (dtype != DType::kF32) return;
        for (const NamedTensor& t : checkpoint_tensors(again, owned)) {
          if (!t.name.starts_with(kWeightPrefix)) continue;
          const NamedTensor& want = state.find(t.name);
          EXPECT_EQ(t.owned, want.owned);
          EXPECT_TRUE(t.box() == want.box());
          EXPECT_EQ(std::memcmp(t.view.data, want.view.data, static_cast<size_t>(t.view.bytes())), 0) << t.name;
        }
      });
      expect_equal(dir);
      const std::string run = dir + "-run";
      save(layout, run);
      export_checkpoint(CheckpointReader(run + "/checkpoint-3"), dir + "-from-checkpoint", options);
      expect_equal(dir + "-from-checkpoint");
    }
  }
}

TEST_F(ShardedCheckpoint, ARankReadsOnlyItsPart) {
  save(test_layouts()[2], folder_ / "tp3");
  const std::string path = folder_ / "tp3/checkpoint-3";
  // With all files but one gone, what lies in that one can be read.
  const CheckpointReader reader(path);
  const CheckpointTensor& tensor = *reader.find("weight.model.layers.0.mlp.down_proj.weight");  // [24, 17] cut in dim 1
  ASSERT_EQ(tensor.slices.size(), 3u);
  const StoredSlice& middle = tensor.slices[1];
  for (size_t i = 0; i < reader.file_count(); ++i)
    if (i != middle.file) remove_tree(path + "/" + reader.file_name(i));
  const Box part = cut_box(tensor.shape, 1, middle.box.begin[1] + 1, 3);
  std::vector<float> values(24 * 3);
  reader.read_part(tensor, part, View(values.data(), part.size, DType::kF32));
  for (int64_t i = 0; i < 24; ++i)
    for (int64_t j = 0; j < 3; ++j)
      EXPECT_EQ(values[static_cast<size_t>(i * 3 + j)], element_of(tensor.name, i * 17 + part.begin[1] + j));
  EXPECT_HAS(error_of(ErrorCode::kCheckpoint, [&] { reader.check_files(); }), "is missing");
}

// After the plan ranks only speak with rank 0, and tell it hashes.
TEST_F(ShardedCheckpoint, ThePlanIsMadeOnce) {
  const TestLayout layout = test_layouts()[6];
  run_local_ranks(layout.mesh.world(), [&](Communicator& world) {
    RankState state(model_, layout, world.rank());
    state.fill();
    SavePlan plan;
    SaveOptions options;
    options.world = &world;
    options.plan = &plan;
    options.model = &model_;
    const auto save = [&](int64_t step) {
      const Communicator::Traffic before = world.traffic();
      save_checkpoint(folder_ / "run", meta_of(step, model_), state.tensors(), options);
      const Communicator::Traffic after = world.traffic();
      EXPECT_EQ(after.operations - before.operations, world.rank() > 0 ? (step == 1 ? 10 : 6) : (step == 1 ? 30 : 18));
      for (const auto member :
           {&Communicator::Traffic::all_to_all, &Communicator::Traffic::all_gather,
            &Communicator::Traffic::reduce_scatter, &Communicator::Traffic::all_reduce,
            &Communicator::Traffic::reduce_to_owners, &Communicator::Traffic::broadcast_from_owners})
        EXPECT_EQ(after.*member - before.*member, 0);
      return after.send - before.send;
    };
    const int64_t first = save(1), second = save(2);
    if (world.rank() > 0) {
      EXPECT_LT(second, first / 2);
    }
    EXPECT_TRUE(plan.made());
    plan.reset();
    EXPECT_FALSE(plan.made());
  });
  EXPECT_EQ(find_latest(folder_ / "run").step, 2);
}

TEST(TensorBox, RunsAndParts) {
  const Shape shape{4, 3, 5};
  EXPECT_EQ(cut_dim_of(whole_box(shape), shape), -1);
  EXPECT_EQ(cut_dim_of(cut_box(shape, 1, 1, 2), shape), 1);
  EXPECT_EQ(cut_dim_of(intersection(cut_box(shape, 1, 1, 2), cut_box(shape, 2, 0, 3)), shape), -2);
  EXPECT_EQ(cut_box(shape, 1, 1, 2).str(), "[0:4, 1:3, 0:5]");
  EXPECT_TRUE(intersection(cut_box(shape, 0, 0, 2), cut_box(shape, 0, 2, 2)).empty());
  std::vector<std::pair<int64_t, int64_t>> runs;
  const auto collect = [&](int64_t offset, int64_t count) { runs.emplace_back(offset, count); };
  for_each_run(whole_box(shape), cut_box(shape, 0, 1, 2), collect);
  EXPECT_EQ(runs, (std::vector<std::pair<int64_t, int64_t>>{{15, 30}}));
  runs.clear();
  for_each_run(cut_box(shape, 0, 1, 3), intersection(cut_box(shape, 0, 2, 2), cut_box(shape, 1, 1, 2)), collect);
  EXPECT_EQ(runs, (std::vector<std::pair<int64_t, int64_t>>{{20, 10}, {35, 10}}));
  runs.clear();
  for_each_run(whole_box(Shape{}), whole_box(Shape{}), collect);
  EXPECT_EQ(runs, (std::vector<std::pair<int64_t, int64_t>>{{0, 1}}));
  EXPECT_THROW(cut_box(shape, 0, 3, 2), Bug);
}

TEST(RankReports, WorkIsDealtByBytes) {
  EXPECT_EQ(deal({4, 4, 4, 4}, 2), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(deal({100, 1, 1}, 3), (std::vector<int>{1, 2, 2}));
  EXPECT_EQ(deal({}, 3), std::vector<int>{});
  EXPECT_EQ(deal({0, 0}, 3).size(), 2u);
}

}  // namespace
}  // namespace concerto
