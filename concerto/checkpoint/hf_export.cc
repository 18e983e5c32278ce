// Writing of Hugging Face folders.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "concerto/base/files.h"
#include "concerto/checkpoint/hf_folder.h"
#include "concerto/checkpoint/rank_reports.h"

namespace concerto {
namespace {

using nlohmann::json;

struct HfFile {
  std::string name;
  SafetensorsLayout layout;
};

const std::map<std::string, std::string> kMetadata{{"format", "pt"}};

void check_request(const std::string& dir, const HfExport& options) {
  CHECK(options.dtype == DType::kBF16 || options.dtype == DType::kF32, "export as {}", dtype_name(options.dtype));
  if (path_exists(dir) && !options.replace)
    throw Error(ErrorCode::kIo, dir, "exists already", "Choose another folder or remove it.");
}

std::vector<HfFile> hf_files(const std::vector<TensorSpec>& specs, const HfExport& options) {
  std::vector<TensorInfo> tensors;
  for (const TensorSpec& spec : specs)
    tensors.push_back({spec.name, spec.shape, spec.keep_f32 ? DType::kF32 : options.dtype});
  const std::vector<size_t> shards = plan_shards(tensors, options.max_shard_bytes);
  std::vector<HfFile> files;
  auto begin = tensors.begin();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto end = begin + static_cast<std::ptrdiff_t>(shards[i]);
    files.push_back({shards.size() == 1 ? std::string(kHfWeightsFile)
                                        : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()),
                     SafetensorsLayout({begin, end}, kMetadata)});
    begin = end;
  }
  return files;
}

// What lies beside the weights; then the folder gets its name.
void finish_folder(StagedDirectory& staged, const std::vector<HfFile>& files, const ModelConfig& config,
                   const HfExport& options) {
  if (files.size() > 1) {
    json weight_map = json::object();
    int64_t bytes = 0;
    for (const HfFile& file : files)
      for (const TensorInfo& tensor : file.layout.tensors) {
        weight_map[tensor.name] = file.name;
        bytes += tensor.shape.elements() * dtype_bytes(tensor.dtype);
      }
    const json index{{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(weight_map)}};
    write_file(staged.path() + "/" + kHfIndexFile, index.dump(2) + "\n");
  }
  const char* dtype = options.dtype == DType::kBF16 ? "bfloat16" : "float32";
  write_file(staged.path() + "/config.json", model_config_json(config, dtype));
  for (const std::string& path : options.copy_files) copy_file_synced(path, staged.path() + "/" + file_name(path));
  staged.commit(options.replace);
}

// Writes a rank's slices into files that are there in their full length.
class SliceWriter {
 public:
  SliceWriter(std::string dir, const std::vector<HfFile>& files) : dir_(std::move(dir)), files_(files) {
    for (size_t f = 0; f < files.size(); ++f)
      for (size_t t = 0; t < files[f].layout.tensors.size(); ++t)
        places_.emplace(files[f].layout.tensors[t].name, std::pair(f, t));
    open_.resize(files.size());
  }

  // `values`: dense, the part `box` of the tensor.
  void write(const std::string& name, const Box& box, const View& values) {
    const auto [f, t] = places_.at(name);
    if (!open_[f]) open_[f] = std::make_unique<FilePatcher>(dir_ + "/" + files_[f].name);
    const SafetensorsLayout& layout = files_[f].layout;
    const DType dtype = layout.tensors[t].dtype;
    CHECK(values.dense() && values.shape == box.size, "{}: {} for {}", name, values.shape.str(), box.str());
    const int64_t bytes = dtype_bytes(dtype), most = kChunkBytes / bytes;
    chunk_.resize(kChunkBytes);
    const auto* from = static_cast<const std::byte*>(values.data);
    for_each_run(whole_box(layout.tensors[t].shape), box, [&](int64_t at, int64_t count) {
      for (int64_t n; count > 0; at += n, count -= n) {
        n = std::min(count, most);
        convert_elements(from, values.dtype, chunk_.data(), dtype, n);
        open_[f]->write_at(layout.offsets[t] + at * bytes, chunk_.data(), static_cast<size_t>(n * bytes));
        from += n * dtype_bytes(values.dtype);
      }
    });
  }

  void finish() {
    for (const auto& file : open_)
      if (file) file->finish();
  }

 private:
  static constexpr int64_t kChunkBytes = 1 << 20;
  std::string dir_;
  const std::vector<HfFile>& files_;
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> places_;
  std::vector<std::unique_ptr<FilePatcher>> open_;
  std::vector<char> chunk_;
};

}  // namespace

std::vector<size_t> plan_shards(const std::vector<TensorInfo>& tensors, int64_t max_bytes) {
  std::vector<size_t> counts{0};
  int64_t bytes = 0;
  for (const TensorInfo& tensor : tensors) {
    const int64_t size = tensor.shape.elements() * dtype_bytes(tensor.dtype);
    if (counts.back() > 0 && bytes + size > max_bytes) {
      counts.push_back(0);
      bytes = 0;
    }
    ++counts.back();
    bytes += size;
  }
  return counts;
}

void write_hf_folder(const std::string& dir, const ModelConfig& config, const TensorSource& source,
                     const HfExport& options) {
  check_request(dir, options);
  const std::vector<TensorSpec> specs = tensor_specs(config);
  std::unordered_map<std::string_view, const TensorSpec*> by_name;
  for (const TensorSpec& spec : specs) by_name[spec.name] = &spec;
  const std::vector<HfFile> files = hf_files(specs, options);
  StagedDirectory staged(dir);
  int64_t done = 0;
  for (const HfFile& file : files) {
    SafetensorsWriter writer(staged.path() + "/" + file.name, file.layout.tensors, kMetadata);
    for (const TensorInfo& tensor : writer.tensors()) {
      const View view = source(*by_name.at(tensor.name));
      CHECK(view.elements() == tensor.shape.elements(), "{}: {}", tensor.name, view.shape.str());
      writer.write(view);
      if (options.progress) options.progress(++done, static_cast<int64_t>(specs.size()));
    }
    writer.finish();
  }
  finish_folder(staged, files, config, options);
}

void write_hf_slices(const std::string& dir, const ModelConfig& config, std::span<const NamedTensor> weights,
                     const SliceSource& source, const HfExport& options, Communicator* world) {
  const CommScope scope("export of the model");
  const RankReports reports(world);
  SavePlan().make(weights, {.max_file_bytes = INT64_MAX, .dtype = {}, .model = &config}, reports);
  const std::vector<HfFile> files = hf_files(tensor_specs(config), options);
  std::optional<StagedDirectory> staged;  // rank 0's
  const std::string staged_path = reports.announce([&] {
    check_request(dir, options);
    staged.emplace(dir);
    for (const HfFile& file : files) {
      FileWriter writer(staged->path() + "/" + file.name);
      writer.write(file.layout.head.data(), file.layout.head.size());
      writer.extend(file.layout.bytes);
      writer.finish();
    }
    return staged->path();
  });
  const auto write = [&] {
    SliceWriter writer(staged_path, files);
    int64_t done = 0;
    for (const NamedTensor& weight : weights) {
      if (options.progress) options.progress(done++, static_cast<int64_t>(weights.size()));
      if (!weight.owned || weight.view.elements() == 0) continue;
      writer.write(weight.name.substr(kWeightPrefix.size()), weight.box(), source(weight));
    }
    writer.finish();
    return std::string();
  };
  reports.agree(write, [&](const std::vector<std::string>&) {
    finish_folder(*staged, files, config, options);
    return std::string();
  });
}

}  // namespace concerto
