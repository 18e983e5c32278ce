#include "concerto/checkpoint/hf_folder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "concerto/base/json.h"
#include "concerto/checkpoint/tensor_faults.h"
#include "concerto/data/tokenizer_config.h"

namespace concerto {
namespace {

using nlohmann::json;

constexpr std::string_view kCorrectionBias = ".mlp.moe_statics.e_score_correction_bias";
constexpr std::string_view kCorrectionBiasInMemory = ".mlp.gate.moe_statics.e_score_correction_bias";
constexpr std::string_view kHead = "lm_head.weight", kEmbedding = "model.embed_tokens.weight";

bool is_mtp(std::string_view name) { return name.starts_with("model.mtp_"); }

// The file's name of a tensor under the name that specs use.
std::string canonical_name(std::string_view name) {
  std::string text(name);
  if (text.ends_with(kCorrectionBiasInMemory))
    text.replace(text.size() - kCorrectionBiasInMemory.size(), std::string::npos, kCorrectionBias);
  return text;
}

// A file of the folder itself: an index must not reach outside.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string("/\0", 2)) == std::string::npos;
}

}  // namespace

HfWeights::HfWeights(const std::string& dir) : dir_(dir) {
  const std::string single = dir + "/" + kHfWeightsFile, index = dir + "/" + kHfIndexFile;
  if (path_exists(single))
    files_.emplace_back(single);
  else if (path_exists(index))
    open_sharded(index);
  else
    throw Error(ErrorCode::kModel, dir, fmt::format("holds neither {} nor {}", kHfWeightsFile, kHfIndexFile),
                "Give a folder as Hugging Face's save_pretrained writes it.");
  for (const SafetensorsFile& file : files_)
    for (const SafetensorsEntry& entry : file.entries())
      index_.emplace(entry.name, &entry);  // no name comes twice: an index lists one shard for each
}

void HfWeights::open_sharded(const std::string& index_path) {
  const json index = parse_json(read_text_file(index_path), ErrorCode::kModel, index_path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    throw Error(ErrorCode::kModel, index_path, "has no object \"weight_map\"");
  std::map<std::string, std::vector<std::string>> shards;  // file -> tensors
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() || !is_plain_name(file.get_ref<const std::string&>()))
      throw Error(ErrorCode::kModel, index_path,
                  "the shard of " + json_quote(name) + " is not the name of a file beside it");
    shards[file.get_ref<const std::string&>()].push_back(name);
  }
  TensorFaults faults(kHfIndexFile);
  for (const auto& [file, names] : shards) {
    const std::string path = dir_ + "/" + file;
    if (!path_exists(path)) {
      faults.add(fmt::format("shard {} is missing ({} tensors)", file, names.size()));
      continue;
    }
    files_.emplace_back(path);
    const std::unordered_set<std::string_view> listed(names.begin(), names.end());
    for (const std::string& name : names)
      if (!files_.back().find(name)) faults.add(json_quote(name) + " is listed but not in " + file);
    for (const SafetensorsEntry& entry : files_.back().entries())
      if (!listed.contains(entry.name))
        faults.add(json_quote(entry.name) + " is in " + file + " but not listed for it");
  }
  if (!faults.empty())
    throw Error(ErrorCode::kModel, index_path, faults.text("does not match its shards"),
                "\nCopy or download the folder again.");
}

const SafetensorsEntry* HfWeights::find(const std::string& name) const {
  auto it = index_.find(name);
  if (it == index_.end() && name.ends_with(kCorrectionBias)) {
    std::string other = name;
    other.replace(other.size() - kCorrectionBias.size(), std::string::npos, kCorrectionBiasInMemory);
    it = index_.find(other);
  }
  return it == index_.end() ? nullptr : it->second;
}

void HfWeights::read(const std::string& name, const View& target) const {
  const SafetensorsEntry& entry = require(name, target.shape);
  copy_tensor(entry, target);
}

void HfWeights::read_part(const TensorSpec& spec, const View& target) const {
  const SafetensorsEntry& entry = require(spec.name, spec.whole());
  const Box part =
      cut_box(spec.whole(), spec.cut_dim, spec.cut_begin, spec.cut_dim >= 0 ? spec.shape[spec.cut_dim] : 0);
  if (!can_convert(entry.dtype, target.dtype)) return copy_tensor(entry, target);  // which names the fault
  copy_box(entry.data, entry.dtype, whole_box(entry.shape), target.data, target.dtype, part, part);
}

const SafetensorsEntry& HfWeights::require(const std::string& name, const Shape& shape) const {
  const SafetensorsEntry* entry = find(name);
  if (!entry) throw Error(ErrorCode::kModel, dir_, "tensor " + json_quote(name) + " is missing");
  if (!(entry->shape == shape))
    throw Error(
        ErrorCode::kModel, dir_,
        fmt::format("tensor {} has shape {}, the config wants {}", json_quote(name), entry->shape.str(), shape.str()));
  return *entry;
}

std::vector<std::string> HfWeights::check(const ModelConfig& config) const {
  TensorFaults faults("the config");
  std::vector<std::string> notes;
  const std::vector<TensorSpec> specs = tensor_specs(config);
  std::unordered_set<std::string_view> known;
  for (const TensorSpec& spec : specs) {
    known.insert(spec.name);
    const SafetensorsEntry* entry = find(spec.name);
    if (!entry && spec.role == TensorRole::kCorrectionBias && !config.moe_use_aux_free) continue;  // not read
    if (!entry)
      faults.missing(spec.name, spec.shape);
    else if (!(entry->shape == spec.shape))
      faults.wrong_shape(spec.name, entry->shape, spec.shape);
    else if (!is_float(entry->dtype))
      faults.wrong_dtype(spec.name, safetensors_dtype_name(entry->dtype), "a float type");
  }
  std::vector<std::string> extra, clashes;
  int64_t unused_mtp = 0;
  for (const auto& [name, entry] : index_) {
    const std::string canonical = canonical_name(name);
    if (known.contains(canonical)) {
      if (canonical != name && index_.contains(canonical))
        clashes.push_back(fmt::format("extra: {} is there under both of its names", canonical));
    } else if (is_mtp(name) && config.num_nextn_predict_layers == 0) {
      ++unused_mtp;
    } else if (name == kHead && config.tie_word_embeddings) {
      const SafetensorsEntry* embedding = find(std::string(kEmbedding));
      const SafetensorsEntry& head = *entry;
      if (embedding && embedding->dtype == head.dtype && embedding->shape == head.shape &&
          std::equal(head.data, head.data + head.bytes, embedding->data))
        notes.push_back(fmt::format("{} is the same as {} and is not read (tie_word_embeddings)", kHead, kEmbedding));
      else
        clashes.push_back(fmt::format("extra: {} differs from {}, but tie_word_embeddings is true", kHead, kEmbedding));
    } else {
      extra.emplace_back(name);
    }
  }
  if (unused_mtp > 0)
    notes.push_back(fmt::format("{} tensors model.mtp_* are not read (num_nextn_predict_layers is 0)", unused_mtp));
  std::sort(extra.begin(), extra.end());  // index_ has no order
  std::sort(clashes.begin(), clashes.end());
  for (const std::string& name : extra) faults.extra(name, index_.at(name)->shape);
  for (std::string& line : clashes) faults.add(std::move(line));
  if (!faults.empty())
    throw Error(ErrorCode::kModel, dir_, faults.text("the weights do not fit config.json"),
                "\nUse the config.json that belongs to the weights, or download the folder again.");
  return notes;
}

std::vector<std::string> tokenizer_files(const std::string& path) {
  const std::string dir = is_directory(path) ? path : parent_directory(path);
  std::vector<std::string> files;
  const auto add = [&](const char* name) {
    if (path_exists(dir + "/" + name)) files.push_back(dir + "/" + name);
  };
  add("tokenizer.model");
  for (const char* name : kTokenizerConfigFiles) add(name);
  return files;
}

std::vector<std::string> files_beside_weights(const std::string& path) {
  std::vector<std::string> files = tokenizer_files(path);
  const std::string generation = (is_directory(path) ? path : parent_directory(path)) + "/generation_config.json";
  if (path_exists(generation)) files.push_back(generation);
  return files;
}

}  // namespace concerto
