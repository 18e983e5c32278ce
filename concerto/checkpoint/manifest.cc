#include "concerto/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "concerto/base/hash.h"
#include "concerto/base/json.h"

namespace concerto {
namespace {

using Json = nlohmann::ordered_json;  // step and cursor first, for people

const std::string kHead = "{\"manifest_hash\":\"", kNoHash = "xxh64:0000000000000000";

// JSON has no infinity, and a run that met one must still be saved.
Json number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

class Reader {
 public:
  Reader(const nlohmann::json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) fail("is not an object");
  }

  [[noreturn]] void fail(const std::string& what) const { throw Error(ErrorCode::kCheckpoint, where_, what); }

  const nlohmann::json& at(const char* key) const {
    if (!json_.contains(key)) fail(fmt::format("has no \"{}\"", key));
    return json_[key];
  }
  int64_t integer(const char* key, int64_t low) const {
    const nlohmann::json& value = at(key);
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) ||
        value.get<int64_t>() < low)
      fail(fmt::format("\"{}\" is not a whole number from {}", key, low));
    return value.get<int64_t>();
  }
  std::string text(const char* key) const {
    if (!at(key).is_string()) fail(fmt::format("\"{}\" is not a string", key));
    return at(key).get<std::string>();
  }
  bool flag(const char* key) const {
    if (!at(key).is_boolean()) fail(fmt::format("\"{}\" is not true or false", key));
    return at(key).get<bool>();
  }
  uint64_t hash(const char* key) const {
    const auto value = parse_hash_text(text(key));
    if (!value) fail(fmt::format("\"{}\" is not a hash", key));
    return *value;
  }
  double real(const nlohmann::json& value) const {
    if (value.is_number()) return value.get<double>();
    if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (value == "inf") return std::numeric_limits<double>::infinity();
    if (value == "-inf") return -std::numeric_limits<double>::infinity();
    fail("holds something that should be a number");
  }
  const nlohmann::json& list(const char* key) const {
    if (!at(key).is_array()) fail(fmt::format("\"{}\" is not a list", key));
    return at(key);
  }

 private:
  const nlohmann::json& json_;
  std::string where_;
};

Json tensor_json(const ManifestTensor& tensor, const std::string& file) {
  Json shape = Json::array(), slice = Json::array();
  for (int i = 0; i < tensor.shape.rank(); ++i) {
    shape.push_back(tensor.shape[i]);
    slice.push_back({tensor.box.begin[i], tensor.box.begin[i] + tensor.box.size[i]});
  }
  Json json{{"name", tensor.name},
            {"shape", std::move(shape)},
            {"dtype", safetensors_dtype_name(tensor.dtype)},
            {"slice", std::move(slice)},
            {"file", file},
            {"hash", hash_text(tensor.hash)}};
  if (tensor.expert >= 0) json["expert"] = tensor.expert;
  return json;
}

void parse_slice(const nlohmann::json& slice, int64_t dim, int64_t format, const Reader& in, Box& box) {
  const auto position = [](const nlohmann::json& x) {
    return x.is_number_unsigned() && x.get<uint64_t>() <= INT64_MAX;
  };
  if (!slice.is_array() || slice.size() != 2 || !position(slice[0]) || !position(slice[1]))
    in.fail("has a slice that is not a list of [begin, end]");
  const int64_t begin = slice[0].get<int64_t>(), end = slice[1].get<int64_t>();
  if (begin > end || end > dim) in.fail(fmt::format("has the slice [{}, {}] of a dim of {}", begin, end, dim));
  // To read a part as the whole would be silently wrong.
  if (format == 1 && (begin != 0 || end != dim)) in.fail("is only a part of its tensor; format 1 has whole ones");
  box.begin.push_back(begin);
  box.size.push_back(end - begin);
}

ManifestTensor parse_tensor(const nlohmann::json& json, const std::string& path, int64_t format,
                            const std::unordered_map<std::string, size_t>& files) {
  const Reader outer(json, path);
  ManifestTensor tensor;
  tensor.name = outer.text("name");
  const Reader in(json, path + ": tensor " + json_quote(tensor.name));
  const nlohmann::json &shape = in.list("shape"), &slice = in.list("slice");
  if (shape.size() > Shape::kMaxRank || slice.size() != shape.size()) in.fail("has a shape or slice of the wrong rank");
  for (size_t i = 0; i < shape.size(); ++i) {
    if (!shape[i].is_number_unsigned() || shape[i].get<uint64_t>() > INT64_MAX) in.fail("has a bad shape");
    tensor.shape.push_back(shape[i].get<int64_t>());
    parse_slice(slice[i], tensor.shape[static_cast<int>(i)], format, in, tensor.box);
  }
  const std::string dtype = in.text("dtype"), file = in.text("file");
  bool known = false;
  for (DType t : {DType::kF32, DType::kBF16, DType::kF64, DType::kF16, DType::kI32, DType::kI64, DType::kU8})
    if (dtype == safetensors_dtype_name(t)) tensor.dtype = t, known = true;
  if (!known) in.fail("has the unknown dtype " + json_quote(dtype));
  const auto found = files.find(file);
  if (found == files.end()) in.fail("is in a file that is not listed: " + json_quote(file));
  tensor.file = found->second;
  tensor.hash = in.hash("hash");
  if (json.contains("expert")) {
    const int64_t expert = in.integer("expert", 0);
    if (expert > std::numeric_limits<int>::max()) in.fail("has a bad expert id");
    tensor.expert = static_cast<int>(expert);
  }
  return tensor;
}

CheckpointMeta parse_meta(const Reader& in) {
  CheckpointMeta meta;
  meta.step = in.integer("step", 0);
  meta.samples = in.integer("samples", 0);
  meta.config_hash = in.text("config_hash");
  meta.tokenizer = in.text("tokenizer");
  meta.weights_only = in.flag("weights_only");
  for (const nlohmann::json& loss : in.list("loss_history")) meta.loss_history.push_back(in.real(loss));
  if (!in.at("valid_loss").is_null()) meta.valid_loss = in.real(in.at("valid_loss"));
  meta.best_valid_loss = in.real(in.at("best_valid_loss"));
  meta.best_step = in.integer("best_step", -1);
  if (!in.at("counters").is_object()) in.fail("\"counters\" is not an object");
  for (const auto& [name, value] : in.at("counters").items()) meta.counters[name] = in.real(value);
  return meta;
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  const CheckpointMeta& meta = manifest.meta;
  const bool whole = std::all_of(manifest.tensors.begin(), manifest.tensors.end(),
                                 [](const ManifestTensor& tensor) { return tensor.box == whole_box(tensor.shape); });
  Json json{{"manifest_hash", kNoHash},    {"format", whole ? 1 : 2},          {"sequence", manifest.sequence},
            {"step", meta.step},           {"samples", meta.samples},          {"config_hash", meta.config_hash},
            {"tokenizer", meta.tokenizer}, {"weights_only", meta.weights_only}};
  json["valid_loss"] = meta.valid_loss ? number(*meta.valid_loss) : Json();
  json["best_valid_loss"] = number(meta.best_valid_loss);
  json["best_step"] = meta.best_step;
  json["counters"] = Json::object();
  for (const auto& [name, value] : meta.counters) json["counters"][name] = number(value);
  json["loss_history"] = Json::array();
  for (double loss : meta.loss_history) json["loss_history"].push_back(number(loss));
  json["model_config_hash"] = hash_text(manifest.model_config_hash);
  json["files"] = Json::array();
  for (const ManifestFile& file : manifest.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"header_hash", hash_text(file.header_hash)}});
  json["tensors"] = Json::array();
  for (const ManifestTensor& tensor : manifest.tensors)
    json["tensors"].push_back(tensor_json(tensor, manifest.files[tensor.file].name));
  // A path that is not UTF-8 must not stop a save.
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  CHECK(text.starts_with(kHead + kNoHash));
  text.replace(kHead.size(), kNoHash.size(), hash_text(hash64(text)));
  return text;
}

int64_t peek_sequence(const std::string& manifest_path) {
  std::ifstream in(manifest_path, std::ios::binary);
  char head[256] = {};
  in.read(head, sizeof head - 1);
  const char* const key = "\"sequence\":";
  const char* at = std::strstr(head, key);
  const long long value = at ? std::strtoll(at + std::strlen(key), nullptr, 10) : 0;
  return value > 0 && value < (1ll << 60) ? value : 0;
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  const auto fail = [&](const std::string& what, const std::string& fix = "") {
    throw Error(ErrorCode::kCheckpoint, path, what, fix);
  };
  if (text.size() < kHead.size() + kNoHash.size() || !text.starts_with(kHead))
    fail("is not the manifest of a checkpoint");
  const auto stated = parse_hash_text(std::string_view(text).substr(kHead.size(), kNoHash.size()));
  std::string zeroed = text;
  zeroed.replace(kHead.size(), kNoHash.size(), kNoHash);
  if (!stated || hash64(zeroed) != *stated) fail("is damaged: its hash does not match", "Use an older checkpoint.");
  const nlohmann::json json = parse_json(text, ErrorCode::kCheckpoint, path);

  const Reader in(json, path);
  const int64_t format = in.integer("format", 0);
  if (format < 1 || format > kCheckpointFormat)
    fail(fmt::format("has format {}, this version reads 1 to {}", format, kCheckpointFormat),
         "Use the version that wrote it.");
  Manifest manifest;
  manifest.sequence = in.integer("sequence", 1);
  manifest.meta = parse_meta(in);
  manifest.model_config_hash = in.hash("model_config_hash");
  std::unordered_map<std::string, size_t> files;
  for (const nlohmann::json& item : in.list("files")) {
    const Reader file(item, path);
    manifest.files.push_back({file.text("name"), file.integer("bytes", 0), file.hash("header_hash")});
    const std::string& name = manifest.files.back().name;
    if (name.empty() || name.find('/') != std::string::npos || !files.emplace(name, files.size()).second)
      fail("lists the file " + json_quote(name) + ", which is twice there or not beside it");
  }
  std::unordered_set<std::string> names;
  for (const nlohmann::json& item : in.list("tensors")) {
    manifest.tensors.push_back(parse_tensor(item, path, format, files));
    if (format == 1 && !names.insert(manifest.tensors.back().name).second)
      fail("lists the tensor " + json_quote(manifest.tensors.back().name) + " twice");
  }
  return manifest;
}

namespace {

// The slices of one tensor, in any order; at least one.
CheckpointTensor join(std::vector<const ManifestTensor*>& slices, TensorFaults& faults,
                      const std::function<std::string(size_t)>& place) {
  const ManifestTensor& first = *slices.front();
  CheckpointTensor tensor{first.name, first.shape, first.dtype, first.expert, {}};
  int dim = -1;
  for (const ManifestTensor* s : slices) {
    if (!(s->shape == first.shape) || s->dtype != first.dtype || s->expert != first.expert) {
      faults.add(fmt::format("contradiction: {} is {} {} (expert {}) in {} and {} {} (expert {}) in {}", s->name,
                             s->shape.str(), dtype_name(s->dtype), s->expert, place(s->file), first.shape.str(),
                             dtype_name(first.dtype), first.expert, place(first.file)));
      return tensor;
    }
    const int cut = cut_dim_of(s->box, s->shape);
    if (cut == -2 || (cut >= 0 && dim >= 0 && cut != dim)) {
      faults.add(fmt::format("cut in two dims: {} {} in {}", s->name, s->box.str(), place(s->file)));
      return tensor;
    }
    dim = std::max(dim, cut);
  }
  dim = std::max(dim, 0);  // all whole: one slice, or else copies
  std::stable_sort(slices.begin(), slices.end(), [&](const ManifestTensor* a, const ManifestTensor* b) {
    return first.shape.rank() > 0 && a->box.begin[dim] < b->box.begin[dim];
  });
  const int64_t all = first.shape.rank() > 0 ? first.shape[dim] : 1;
  int64_t at = 0;
  const ManifestTensor* before = nullptr;
  for (const ManifestTensor* s : slices) {
    const int64_t begin = s->box.rank() > 0 ? s->box.begin[dim] : 0, size = s->box.rank() > 0 ? s->box.size[dim] : 1;
    if (begin > at) faults.add(fmt::format("missing: {} [{}:{}] of dim {}", s->name, at, begin, dim));
    if (before && begin < at)
      faults.add(fmt::format("twice: {} {} in {} and {} in {}", s->name, before->box.str(), place(before->file),
                             s->box.str(), place(s->file)));
    at = std::max(at, begin + size);
    before = s;
    tensor.slices.push_back({s->box, s->file, s->hash});
  }
  if (at < all) faults.add(fmt::format("missing: {} [{}:{}] of dim {}", first.name, at, all, dim));
  return tensor;
}

}  // namespace

std::vector<CheckpointTensor> join_slices(const std::vector<ManifestTensor>& slices, TensorFaults& faults,
                                          const std::function<std::string(size_t file)>& place) {
  std::unordered_map<std::string_view, size_t> index;
  std::vector<std::vector<const ManifestTensor*>> groups;
  for (const ManifestTensor& slice : slices) {
    const auto [it, is_new] = index.emplace(slice.name, groups.size());
    if (is_new) groups.emplace_back();
    groups[it->second].push_back(&slice);
  }
  std::vector<CheckpointTensor> tensors;
  tensors.reserve(groups.size());
  for (std::vector<const ManifestTensor*>& group : groups) tensors.push_back(join(group, faults, place));
  return tensors;
}

}  // namespace concerto
