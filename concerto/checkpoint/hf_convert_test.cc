#include "concerto/checkpoint/hf_convert.h"

#include <gtest/gtest.h>

#include <cstring>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
namespace concerto {
namespace {

class HfConvert : public testing::Test {
 protected:
  ~HfConvert() override { set_io_fault_for_tests(nullptr); }
  const TestFolder folder_;
  const std::string dir_ = folder_.path();
};

void expect_same_tensors(const std::string& a, const std::string& b) {
  const SafetensorsFile first(a), second(b);
  ASSERT_EQ(first.entries().size(), second.entries().size());
  for (const SafetensorsEntry& entry : first.entries()) {
    const SafetensorsEntry& other = second.require(entry.name);
    ASSERT_EQ(entry.bytes, other.bytes);
    EXPECT_EQ(std::memcmp(entry.data, other.data, static_cast<size_t>(entry.bytes)), 0) << entry.name;
  }
}

TEST_F(HfConvert, ImportThenExportGivesTheSameFolder) {
  for (const std::string name : {"dense-tiny", "moe-tiny", "moe-interval2", "moe-packed"}) {
    const std::string golden = "tests/golden/" + name, run = dir_ + "/run-" + name, out = dir_ + "/out-" + name;
    const ImportResult imported = import_hf_folder(golden, run);
    EXPECT_EQ(imported.checkpoint, run + "/checkpoint-0");
    EXPECT_EQ(find_latest(run).path, imported.checkpoint);
    const CheckpointReader reader(imported.checkpoint);
    EXPECT_TRUE(reader.meta().weights_only);
    EXPECT_EQ(reader.meta().config_hash, "");
    export_checkpoint(reader, out, {.dtype = DType::kF32, .copy_files = {}});
    expect_same_tensors(golden + "/model.safetensors", out + "/model.safetensors");
    EXPECT_EQ(model_config_json(load_model_config(out), "float32"),
              model_config_json(load_model_config(golden), "float32"));
  }
}

TEST_F(HfConvert, ABf16FolderComesInAsF32) {
  import_hf_folder("tests/golden/moe-tiny", dir_ + "/a");
  export_checkpoint(CheckpointReader(dir_ + "/a/checkpoint-0"), dir_ + "/bf16",
                    {.dtype = DType::kBF16, .copy_files = {}});
  import_hf_folder(dir_ + "/bf16", dir_ + "/b");
  const CheckpointReader reader(dir_ + "/b/checkpoint-0");
  reader.verify();
  for (const CheckpointTensor& tensor : reader.tensors()) EXPECT_EQ(tensor.dtype, DType::kF32) << tensor.name;
  export_checkpoint(reader, dir_ + "/again", {.dtype = DType::kBF16, .copy_files = {}});
  expect_same_tensors(dir_ + "/bf16/model.safetensors", dir_ + "/again/model.safetensors");
}

TEST_F(HfConvert, AFolderWithoutTokenizerNamesNone) {
  make_directories(dir_ + "/hf");
  for (const char* file : {"config.json", "model.safetensors"})
    copy_file_synced(std::string("tests/golden/dense-tiny/") + file, dir_ + "/hf/" + file);
  write_file_atomic(dir_ + "/hf/generation_config.json", "{}");
  import_hf_folder(dir_ + "/hf", dir_ + "/a");
  EXPECT_EQ(CheckpointReader(dir_ + "/a/checkpoint-0").meta().tokenizer, "");
  write_file_atomic(dir_ + "/hf/tokenizer.model", "pieces");
  import_hf_folder(dir_ + "/hf", dir_ + "/b");
  EXPECT_EQ(CheckpointReader(dir_ + "/b/checkpoint-0").meta().tokenizer, dir_ + "/hf");
}

// A router that does not look at the correction bias needs none in the files.
TEST_F(HfConvert, AnUnusedCorrectionBiasMayBeAbsent) {
  ModelConfig model = load_model_config("tests/golden/moe-tiny");
  model.moe_use_aux_free = false;
  make_directories(dir_ + "/hf");
  write_file_atomic(dir_ + "/hf/config.json", model_config_json(model, "float32"));
  const HfWeights weights("tests/golden/moe-tiny");
  std::vector<TensorInfo> infos;
  for (const TensorSpec& spec : tensor_specs(model))
    if (spec.role != TensorRole::kCorrectionBias) infos.push_back({spec.name, spec.shape, DType::kF32});
  SafetensorsWriter writer(dir_ + "/hf/model.safetensors", infos);
  for (const TensorInfo& info : writer.tensors()) {
    std::vector<float> values(static_cast<size_t>(info.shape.elements()));
    weights.read(info.name, View(values.data(), info.shape, DType::kF32));
    writer.write(View(values.data(), info.shape, DType::kF32));
  }
  writer.finish();
  const CheckpointReader reader(import_hf_folder(dir_ + "/hf", dir_ + "/run").checkpoint);
  check_checkpoint_weights(reader, model);
  int biases = 0;
  for (const TensorSpec& spec : tensor_specs(model)) {
    if (spec.role != TensorRole::kCorrectionBias) continue;
    std::vector<float> values(static_cast<size_t>(spec.shape.elements()), 1);
    reader.read(std::string(kWeightPrefix) + spec.name, View(values.data(), spec.shape, DType::kF32));
    EXPECT_EQ(values, std::vector<float>(values.size(), 0.0f));
    ++biases;
  }
  EXPECT_EQ(biases, 2);
}

TEST_F(HfConvert, ImportRefusesAnExistingFolder) {
  make_directories(dir_ + "/run");
  try {
    import_hf_folder("tests/golden/moe-tiny", dir_ + "/run");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kIo);
    EXPECT_HAS(std::string(e.what()), "exists already");
  }
  EXPECT_TRUE(list_directory(dir_ + "/run").empty());
}

TEST_F(HfConvert, AFailedImportLeavesNothing) {
  int writes = 0;
  set_io_fault_for_tests([&](std::string_view operation, const std::string&) {
    return operation == "write" && ++writes == 9 ? ENOSPC : 0;
  });
  EXPECT_THROW(import_hf_folder("tests/golden/moe-tiny", dir_ + "/run"), Error);
  EXPECT_TRUE(list_directory(dir_).empty());
}

TEST_F(HfConvert, WeightsThatDoNotFitTheModelAreNamed) {
  import_hf_folder("tests/golden/moe-tiny", dir_ + "/run");
  const CheckpointReader reader(dir_ + "/run/checkpoint-0");
  ModelConfig model = checkpoint_model(reader);
  check_checkpoint_weights(reader, model);
  model.moe_num_experts += 1;
  model.num_hidden_layers -= 1;
  try {
    check_checkpoint_weights(reader, model);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kCheckpoint);
    const std::string message = e.what();
    EXPECT_HAS(message, "missing: weight.model.layers.1.mlp.experts.16.up_proj.weight");
    EXPECT_HAS(message, "wrong shape: weight.model.layers.1.mlp.gate.weight is [16, 64], the model wants [17, 64]");
    EXPECT_HAS(message, "extra: weight.model.layers.2.input_layernorm.weight");
  }
}

// An expert under another's id would be trained, moved and saved as the wrong one.
TEST_F(HfConvert, AnExpertUnderAnotherIdIsNamed) {
  const ModelConfig model = load_model_config("tests/golden/moe-tiny");
  const HfWeights weights("tests/golden/moe-tiny");
  std::vector<NamedTensor> tensors;
  for (const TensorSpec& spec : tensor_specs(model)) {
    const SafetensorsEntry* entry = weights.find(spec.name);
    const View view(const_cast<std::byte*>(entry->data), entry->shape, entry->dtype);
    tensors.push_back({std::string(kWeightPrefix) + spec.name, view, spec.expert == 5 ? 6 : spec.expert});
  }
  CheckpointMeta meta;
  meta.model_config = model_config_json(model, "float32");
  const CheckpointReader reader(save_checkpoint(dir_, meta, tensors));
  try {
    check_checkpoint_weights(reader, model);
    FAIL();
  } catch (const Error& e) {
    EXPECT_HAS(std::string(e.what()), "belongs to expert 6, the model wants 5");
  }
}

TEST_F(HfConvert, TheTokenizerIsRemembered) {
  import_hf_folder("tests/golden/dense-tiny", dir_ + "/a");
  export_checkpoint(CheckpointReader(dir_ + "/a/checkpoint-0"), dir_ + "/hf", {.dtype = DType::kF32, .copy_files = {}});
  write_file_atomic(dir_ + "/hf/tokenizer.model", "pieces");
  import_hf_folder(dir_ + "/hf", dir_ + "/b");
  EXPECT_EQ(CheckpointReader(dir_ + "/a/checkpoint-0").meta().tokenizer, "");
  EXPECT_EQ(CheckpointReader(dir_ + "/b/checkpoint-0").meta().tokenizer, dir_ + "/hf");
}

}  // namespace
}  // namespace concerto
