#include "concerto/checkpoint/hf_folder.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/data/tokenizer_config.h"
namespace concerto {
namespace {

using nlohmann::json;

const char* const kTextCases[] = {"dense-tiny", "moe-tiny", "moe-interval2", "moe-padded", "moe-packed"};

template <class F>
std::string model_failure(F&& f) {
  return error_of(ErrorCode::kModel, f);
}

class HfFolder : public testing::Test {
 protected:
  ~HfFolder() override { set_io_fault_for_tests(nullptr); }

  struct Tensor {
    Shape shape;
    DType dtype;
    std::vector<float> values;
  };
  using Tensors = std::map<std::string, Tensor>;

  static Tensors golden_tensors(const std::string& name) {
    Tensors tensors;
    const SafetensorsFile file("tests/golden/" + name + "/model.safetensors");
    for (const SafetensorsEntry& entry : file.entries()) {
      Tensor tensor{entry.shape, entry.dtype, std::vector<float>(static_cast<size_t>(entry.shape.elements()))};
      copy_tensor(entry, View(tensor.values.data(), entry.shape, DType::kF32));
      tensors[entry.name] = std::move(tensor);
    }
    return tensors;
  }

  // A single-file folder of these tensors.
  std::string folder_of(const Tensors& tensors) const {
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : tensors) infos.push_back({name, tensor.shape, tensor.dtype});
    SafetensorsWriter writer(dir_ + "/model.safetensors", infos);
    for (const TensorInfo& info : writer.tensors()) {
      const Tensor& tensor = tensors.at(info.name);
      if (tensor.dtype == DType::kI64) {
        std::vector<int64_t> integers(tensor.values.begin(), tensor.values.end());
        writer.write(View(integers.data(), tensor.shape, DType::kI64));
      } else {
        writer.write(View(const_cast<float*>(tensor.values.data()), tensor.shape, DType::kF32));
      }
    }
    writer.finish();
    return dir_;
  }

  const TestFolder folder_;
  const std::string dir_ = folder_.path();
};

// Copies every tensor of the golden folder through write_hf_folder.
void rewrite(const std::string& golden, const std::string& out, const HfExport& options) {
  const ModelConfig config = load_model_config(golden);
  const HfWeights weights(golden);
  EXPECT_TRUE(weights.check(config).empty());
  std::vector<float> values;
  write_hf_folder(
      out, config,
      [&](const TensorSpec& spec) {
        values.resize(static_cast<size_t>(spec.shape.elements()));
        const View view(values.data(), spec.shape, DType::kF32);
        weights.read(spec.name, view);
        return view;
      },
      options);
}

TEST_F(HfFolder, GoldenFoldersRoundTripBitForBit) {
  for (const char* name : kTextCases)
    for (int64_t shard : {kDefaultShardBytes, int64_t{100'000}, int64_t{1}}) {
      if (shard == 1 && std::string(name) != "dense-tiny") continue;  // a sync a tensor takes its time
      const std::string golden = std::string("tests/golden/") + name, out = dir_ + "/out";
      rewrite(golden, out, {.dtype = DType::kF32, .max_shard_bytes = shard, .copy_files = {}, .replace = true});
      const HfWeights copy(out);
      EXPECT_TRUE(copy.check(load_model_config(out)).empty());
      const SafetensorsFile original(golden + "/model.safetensors");
      ASSERT_EQ(copy.tensor_count(), static_cast<int64_t>(original.entries().size()));
      if (shard == 1) {
        EXPECT_EQ(copy.files().size(), original.entries().size());  // one tensor a shard
      } else {
        EXPECT_EQ(copy.files().size() == 1, shard == kDefaultShardBytes);
      }
      for (const SafetensorsEntry& entry : original.entries()) {
        const SafetensorsEntry* other = copy.find(entry.name);
        ASSERT_TRUE(other) << entry.name;
        ASSERT_EQ(other->bytes, entry.bytes);
        ASSERT_EQ(std::memcmp(other->data, entry.data, static_cast<size_t>(entry.bytes)), 0) << entry.name;
      }
    }
}

TEST_F(HfFolder, IndexIsAsTransformersWantsIt) {
  const std::string out = dir_ + "/out";
  rewrite("tests/golden/moe-tiny", out, {.dtype = DType::kBF16, .max_shard_bytes = 100'000, .copy_files = {}});
  const json index = json::parse(read_text_file(out + "/model.safetensors.index.json"));
  int64_t total = 0;
  const HfWeights weights(out);
  for (const SafetensorsFile& file : weights.files()) {
    EXPECT_EQ(file.metadata().at("format"), "pt");
    for (const SafetensorsEntry& entry : file.entries()) {
      total += entry.bytes;
      EXPECT_EQ(out + "/" + index["weight_map"][entry.name].get<std::string>(), file.path());
    }
  }
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_FALSE(path_exists(out + "/model.safetensors"));
}

TEST_F(HfFolder, Bf16RoundsToNearestButTheRouterStaysF32) {
  const HfWeights original("tests/golden/moe-tiny");
  const std::string out = dir_ + "/out";
  rewrite("tests/golden/moe-tiny", out, {.dtype = DType::kBF16, .copy_files = {}});
  const HfWeights weights(out);
  for (const TensorSpec& spec : tensor_specs(load_model_config(out))) {
    const SafetensorsEntry* entry = weights.find(spec.name);
    ASSERT_TRUE(entry);
    EXPECT_EQ(entry->dtype, spec.keep_f32 ? DType::kF32 : DType::kBF16) << spec.name;
    std::vector<float> a(static_cast<size_t>(spec.shape.elements())), b = a;
    original.read(spec.name, View(a.data(), spec.shape, DType::kF32));
    weights.read(spec.name, View(b.data(), spec.shape, DType::kF32));
    for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(b[i], spec.keep_f32 ? a[i] : static_cast<float>(bf16(a[i])));
  }
  EXPECT_EQ(json::parse(read_text_file(out + "/config.json"))["dtype"], "bfloat16");
}

TEST_F(HfFolder, ReadsIntoF64) {
  const HfWeights weights("tests/golden/dense-tiny");
  std::vector<double> d(64);
  std::vector<float> f(64);
  weights.read("model.norm.weight", View(d.data(), Shape{64}, DType::kF64));
  weights.read("model.norm.weight", View(f.data(), Shape{64}, DType::kF32));
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(d[i], static_cast<double>(f[i]));
}

TEST_F(HfFolder, NamesEveryTensorThatDoesNotFit) {
  const ModelConfig config = load_model_config("tests/golden/moe-tiny");
  Tensors tensors = golden_tensors("moe-tiny");
  tensors.erase("model.norm.weight");
  tensors.erase("model.layers.1.mlp.experts.3.up_proj.weight");
  Tensor& wide = tensors["model.layers.0.mlp.up_proj.weight"];
  std::swap(wide.shape, tensors["model.layers.0.mlp.down_proj.weight"].shape);
  tensors["model.layers.2.input_layernorm.weight"].dtype = DType::kI64;
  tensors["model.layers.9.input_layernorm.weight"] = {Shape{2}, DType::kF32, {1, 2}};
  const HfWeights weights(folder_of(tensors));
  const std::string message = model_failure([&] { weights.check(config); });
  EXPECT_HAS(message, "6 faults");
  EXPECT_HAS(message, "missing: model.norm.weight [64]");
  EXPECT_HAS(message, "missing: model.layers.1.mlp.experts.3.up_proj.weight");
  EXPECT_HAS(message, "wrong shape: model.layers.0.mlp.up_proj.weight is [64, 128], the config wants [128, 64]");
  EXPECT_HAS(message, "wrong shape: model.layers.0.mlp.down_proj.weight");
  EXPECT_HAS(message, "wrong dtype: model.layers.2.input_layernorm.weight is I64");
  EXPECT_HAS(message, "extra: model.layers.9.input_layernorm.weight [2]");
  float value;
  EXPECT_HAS(model_failure([&] { weights.read("model.norm.weight", View(&value, Shape{1}, DType::kF32)); }),
             "is missing");
  EXPECT_HAS(model_failure([&] { weights.read("model.embed_tokens.weight", View(&value, Shape{1}, DType::kF32)); }),
             "has shape [256, 64]");
}

TEST_F(HfFolder, WantsTheCorrectionBiasOnlyWhereItIsRead) {
  ModelConfig config = load_model_config("tests/golden/moe-tiny");
  Tensors tensors = golden_tensors("moe-tiny");
  tensors.erase("model.layers.1.mlp.moe_statics.e_score_correction_bias");
  const HfWeights weights(folder_of(tensors));
  EXPECT_HAS(model_failure([&] { weights.check(config); }), "missing: model.layers.1.mlp.moe_statics");
  config.moe_use_aux_free = false;
  EXPECT_NO_THROW(weights.check(config));
}

// A bias that the choices do not look at is no fault, but a model trained with it gives other numbers: it is said.
TEST_F(HfFolder, ABiasThatIsNotLookedAtIsSaid) {
  ModelConfig config = load_model_config("tests/golden/moe-tiny");
  ParameterStore store(tensor_specs(config), DType::kF32, StoreUse::kInfer);
  EXPECT_TRUE(load_hf_weights("tests/golden/moe-tiny", config, store).empty());
  config.moe_use_aux_free = false;
  const std::vector<std::string> notes = load_hf_weights("tests/golden/moe-tiny", config, store);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_HAS(notes[0], "holds a correction bias, but moe_use_aux_free is false");
}

TEST_F(HfFolder, TakesTheCorrectionBiasUnderItsNameInMemory) {
  const ModelConfig config = load_model_config("tests/golden/moe-tiny");
  Tensors tensors = golden_tensors("moe-tiny");
  const std::string name = "model.layers.1.mlp.moe_statics.e_score_correction_bias";
  const std::string other = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias";
  tensors[other] = tensors.at(name);
  {
    const HfWeights both(folder_of(tensors));
    EXPECT_HAS(model_failure([&] { both.check(config); }), "under both of its names");
  }
  tensors.erase(name);
  const HfWeights weights(folder_of(tensors));
  EXPECT_TRUE(weights.check(config).empty());
  std::vector<float> bias(16);
  weights.read(name, View(bias.data(), Shape{1, 16}, DType::kF32));
  EXPECT_EQ(bias, tensors.at(other).values);
}

TEST_F(HfFolder, ATiedHeadMayBeThereIfItIsTheEmbedding) {
  const ModelConfig config = load_model_config("tests/golden/dense-tiny");
  ASSERT_TRUE(config.tie_word_embeddings);
  Tensors tensors = golden_tensors("dense-tiny");
  Tensor& head = tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  {
    const auto notes = HfWeights(folder_of(tensors)).check(config);
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_HAS(notes[0], "lm_head.weight");
  }
  head.values[5] += 1;
  const HfWeights weights(folder_of(tensors));
  EXPECT_HAS(model_failure([&] { weights.check(config); }), "lm_head.weight differs from model.embed_tokens.weight");
}

TEST_F(HfFolder, MtpTensorsAreReadOnlyIfTheConfigAsks) {
  ModelConfig config = load_model_config("tests/golden/dense-tiny");
  Tensors tensors = golden_tensors("dense-tiny");
  config.num_nextn_predict_layers = 1;
  EXPECT_HAS(model_failure([&] { HfWeights("tests/golden/dense-tiny").check(config); }),
             "missing: model.mtp_linear_proj.0.weight");
  for (const TensorSpec& spec : tensor_specs(config))
    if (!tensors.contains(spec.name))
      tensors[spec.name] = {spec.shape, DType::kF32, std::vector<float>(static_cast<size_t>(spec.shape.elements()))};
  const HfWeights weights(folder_of(tensors));
  EXPECT_TRUE(weights.check(config).empty());
  config.num_nextn_predict_layers = 0;
  const auto notes = weights.check(config);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_HAS(notes[0], "model.mtp_* are not read");
}

TEST_F(HfFolder, IndexMustMatchItsShards) {
  const std::string out = dir_ + "/out";
  rewrite("tests/golden/dense-tiny", out, {.dtype = DType::kF32, .max_shard_bytes = 100'000, .copy_files = {}});
  const std::string path = out + "/model.safetensors.index.json";
  const json good = json::parse(read_text_file(path));
  const auto failure = [&](const json& index) {
    write_file_atomic(path, index.dump());
    return model_failure([&] { HfWeights weights(out); });
  };
  json index = good;
  index["weight_map"]["ghost"] = good["weight_map"]["model.norm.weight"];
  EXPECT_HAS(failure(index), "\"ghost\" is listed but not in model-");
  index = good;
  index["weight_map"].erase("model.norm.weight");
  EXPECT_HAS(failure(index), "\"model.norm.weight\" is in model-");
  index = good;
  index["weight_map"]["model.norm.weight"] = "../secret.safetensors";
  EXPECT_HAS(failure(index), "not the name of a file beside it");
  index["weight_map"]["model.norm.weight"] = 3;
  EXPECT_HAS(failure(index), "not the name of a file beside it");
  EXPECT_HAS(failure(json::object()), "no object \"weight_map\"");
  write_file_atomic(path, good.dump());
  remove_tree(out + "/" + good["weight_map"]["model.norm.weight"].get<std::string>());
  EXPECT_HAS(model_failure([&] { HfWeights weights(out); }), "is missing");
}

TEST_F(HfFolder, ATensorInTwoShardsIsAnError) {
  const float x[1] = {1};
  for (const char* shard : {"a", "b"}) {
    SafetensorsWriter writer(dir_ + "/" + shard, {{"x", Shape{1}, DType::kF32}});
    writer.write(View(const_cast<float*>(x), Shape{1}, DType::kF32));
    writer.finish();
  }
  write_file_atomic(dir_ + "/model.safetensors.index.json", R"({"weight_map": {"x": "a", "y": "b"}})");
  EXPECT_HAS(model_failure([&] { HfWeights weights(dir_); }), "\"x\" is in b but not listed for it");
}

TEST_F(HfFolder, AFolderWithoutWeightsIsAnError) {
  EXPECT_HAS(model_failure([&] { HfWeights weights(dir_); }), "holds neither model.safetensors nor");
}

TEST_F(HfFolder, TokenizerFilesAreCopied) {
  write_file_atomic(dir_ + "/tokenizer.model", "pieces");
  write_file_atomic(dir_ + "/tokenizer_config.json", "{}");
  write_file_atomic(dir_ + "/notes.txt", "no");
  const auto files = tokenizer_files(dir_ + "/tokenizer.model");
  EXPECT_EQ(files, tokenizer_files(dir_));
  const std::string out = dir_ + "/out";
  rewrite("tests/golden/dense-tiny", out, {.dtype = DType::kBF16, .copy_files = files});
  EXPECT_EQ(list_directory(out),
            (std::vector<std::string>{"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"}));
  EXPECT_EQ(read_text_file(out + "/tokenizer.model"), "pieces");
}

// Of the tokenizer's files, those that Tokenizer::load reads; how to generate is no part of it.
TEST_F(HfFolder, GenerationConfigMakesNoTokenizer) {
  write_file_atomic(dir_ + "/generation_config.json", "{}");
  EXPECT_TRUE(tokenizer_files(dir_).empty());
  EXPECT_EQ(files_beside_weights(dir_), (std::vector<std::string>{dir_ + "/generation_config.json"}));
  for (const char* name : kTokenizerConfigFiles) write_file_atomic(dir_ + "/" + name, "{}");
  EXPECT_EQ(tokenizer_files(dir_).size(), std::size(kTokenizerConfigFiles));
}

TEST_F(HfFolder, ExportIsAllOrNothing) {
  const std::string out = dir_ + "/out";
  int calls = 0;
  set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls, 0; });
  rewrite("tests/golden/dense-tiny", out, {.dtype = DType::kBF16, .copy_files = {}});
  set_io_fault_for_tests(nullptr);
  EXPECT_THROW(rewrite("tests/golden/dense-tiny", out, {.dtype = DType::kBF16, .copy_files = {}}), Error);  // it exists
  remove_tree(out);
  const int total = calls - 2;  // the last two sync the parent after the rename
  ASSERT_GT(total, 20);
  for (int fail = 1; fail <= total; ++fail) {
    calls = 0;
    set_io_fault_for_tests([&](std::string_view, const std::string&) { return ++calls == fail ? ENOSPC : 0; });
    EXPECT_THROW(rewrite("tests/golden/dense-tiny", out, {.dtype = DType::kBF16, .copy_files = {}}), Error) << fail;
    set_io_fault_for_tests(nullptr);
    EXPECT_FALSE(path_exists(out + ".concerto.tmp")) << fail;
    EXPECT_FALSE(path_exists(out)) << fail;
  }
}

}  // namespace
}  // namespace concerto
