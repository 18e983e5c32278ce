#include "concerto/checkpoint/save_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "concerto/base/hash.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/checkpoint/hf_folder.h"
#include "concerto/checkpoint/manifest.h"
#include "concerto/checkpoint/tensor_faults.h"

namespace concerto {
namespace {

using nlohmann::json;

constexpr int kKinds = 2;
constexpr const char* kKindNames[kKinds] = {"weights", "optimizer"};

int kind_of(const NamedTensor& tensor) { return tensor.name.starts_with(kWeightPrefix) ? 0 : 1; }

bool writes(const NamedTensor& tensor) {
  return tensor.owned && (tensor.view.elements() > 0 || tensor.whole().elements() == 0);
}

DType file_dtype(const NamedTensor& tensor, const SaveRules& rules) { return rules.dtype.value_or(tensor.view.dtype); }

uint64_t fingerprint_of(std::span<const NamedTensor> tensors, const SaveRules& rules) {
  Hash64 hash;
  const auto add = [&](const std::string& text) { hash.update(text.data(), text.size()); };
  add(fmt::format("{} {}\n", rules.max_file_bytes, rules.moments));
  for (const NamedTensor& t : tensors)
    add(fmt::format("{} {} {} {} {} {} {} {}\n", t.name, t.view.shape.str(), dtype_name(file_dtype(t, rules)), t.expert,
                    t.whole().str(), t.cut_dim, t.cut_begin, t.owned));
  return hash.digest();
}

// The tensors that a rank writes, cut into files; in a file in the order of its bytes.
std::vector<SavePlan::File> cut_files(std::span<const NamedTensor> tensors, const SaveRules& rules, int kind) {
  std::vector<TensorInfo> infos;
  std::unordered_map<std::string_view, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (kind_of(tensors[i]) != kind || !writes(tensors[i])) continue;
    infos.push_back({tensors[i].name, tensors[i].view.shape, file_dtype(tensors[i], rules)});
    index.emplace(tensors[i].name, i);
  }
  std::vector<SavePlan::File> files;
  if (infos.empty()) return files;
  auto begin = infos.begin();
  for (const size_t count : plan_shards(infos, rules.max_file_bytes)) {
    const auto end = begin + static_cast<std::ptrdiff_t>(count);
    SavePlan::File& file = files.emplace_back();
    for (const TensorInfo& info : SafetensorsLayout({begin, end}, {}).tensors)
      file.tensors.push_back(index.at(info.name));
    begin = end;
  }
  return files;
}

json numbers(const Shape& shape) {
  json list = json::array();
  for (int i = 0; i < shape.rank(); ++i) list.push_back(shape[i]);
  return list;
}

Shape parse_shape(const json& list) {
  Shape shape;
  for (const json& dim : list) shape.push_back(dim.get<int64_t>());
  return shape;
}

// What a rank tells rank 0: how many files of each kind it writes, what is in them, and what it only has copies of.
struct Part {
  size_t files[kKinds] = {};
  std::vector<SavePlan::Slice> written;  // `file` counts this rank's
  std::vector<SavePlan::Slice> held;     // not written here; `box` is not used
};

json slice_json(const SavePlan::Slice& s) {
  return {s.name, numbers(s.shape), static_cast<int>(s.dtype), s.expert, numbers(s.box.begin), numbers(s.box.size),
          s.file};
}

SavePlan::Slice parse_slice(const json& s) {
  return {s[0], parse_shape(s[1]), static_cast<DType>(s[2].get<int>()), s[3], {parse_shape(s[4]), parse_shape(s[5])},
          s[6]};
}

std::string part_text(std::span<const NamedTensor> tensors, const SaveRules& rules,
                      const std::vector<SavePlan::File> (&files)[kKinds]) {
  json part{{"files", json::array()}, {"written", json::array()}, {"held", json::array()}};
  const auto slice = [&](const NamedTensor& t, size_t file) {
    return slice_json({t.name, t.whole(), file_dtype(t, rules), t.expert, t.box(), file});
  };
  size_t number = 0;
  for (const std::vector<SavePlan::File>& of_kind : files) {
    part["files"].push_back(of_kind.size());
    for (const SavePlan::File& file : of_kind) {
      for (const size_t i : file.tensors) part["written"].push_back(slice(tensors[i], number));
      ++number;
    }
  }
  for (const NamedTensor& tensor : tensors)
    if (!writes(tensor)) part["held"].push_back(slice(tensor, 0));
  return part.dump();
}

Part parse_part(const std::string& text) {
  const json in = json::parse(text);
  Part part;
  for (size_t kind = 0; kind < kKinds; ++kind) part.files[kind] = in["files"][kind];
  for (const json& slice : in["written"]) part.written.push_back(parse_slice(slice));
  for (const json& slice : in["held"]) part.held.push_back(parse_slice(slice));
  return part;
}

int64_t bytes_of(const Shape& shape, DType dtype) { return shape.elements() * dtype_bytes(dtype); }

// Are the parts every tensor that any rank lists, and the model's, each exactly once?
void check_complete(const std::vector<Part>& parts, const SaveRules& rules) {
  TensorFaults faults("the model");
  std::vector<ManifestTensor> slices;
  int64_t have = 0, want = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank)
    for (const SavePlan::Slice& s : parts[rank].written) {
      slices.push_back({s.name, s.shape, s.dtype, s.expert, s.box, rank, 0});
      have += bytes_of(s.box.size, s.dtype);
    }
  std::unordered_map<std::string_view, CheckpointTensor> written;
  const std::vector<CheckpointTensor> joined =
      join_slices(slices, faults, [](size_t rank) { return fmt::format("rank {}", rank); });
  for (const CheckpointTensor& tensor : joined) {
    written.emplace(tensor.name, tensor);
    want += tensor.bytes();
  }
  std::unordered_set<std::string_view> lacking;
  for (size_t rank = 0; rank < parts.size(); ++rank)
    for (const SavePlan::Slice& s : parts[rank].held)
      if (!written.contains(s.name) && lacking.insert(s.name).second) {
        faults.add(fmt::format("missing: {} {}: rank {} has it, and nobody owns it", s.name, s.shape.str(), rank));
        want += bytes_of(s.shape, s.dtype);
      }
  if (rules.model) {
    std::unordered_set<std::string> known;
    const auto expect = [&](std::string_view prefix, const TensorSpec& spec) {
      const std::string name = std::string(prefix) + spec.name;
      known.insert(name);
      const auto it = written.find(name);
      if (it == written.end()) {
        if (lacking.contains(name)) return;
        faults.missing(name, spec.shape);
        want += bytes_of(spec.shape, rules.dtype.value_or(DType::kF32));
      } else if (!(it->second.shape == spec.shape)) {
        faults.wrong_shape(name, it->second.shape, spec.shape);
      } else if (it->second.expert != spec.expert) {
        faults.wrong_expert(name, it->second.expert, spec.expert);
      }
    };
    for (const TensorSpec& spec : tensor_specs(*rules.model)) {
      expect(kWeightPrefix, spec);
      if (!rules.moments || !spec.trainable) continue;
      expect(kMoment1Prefix, spec);
      expect(kMoment2Prefix, spec);
    }
    for (const CheckpointTensor& tensor : joined)
      if (!known.contains(tensor.name)) faults.extra(tensor.name, tensor.shape);
  }
  if (faults.empty()) {
    CHECK(have == want, "{} bytes of {}", have, want);
    return;
  }
  throw Error(
      ErrorCode::kCheckpoint, fmt::format("the shards of {} rank{}", parts.size(), parts.size() == 1 ? "" : "s"),
      faults.text(fmt::format("do not make up the model: {} bytes of {}", have, want)), "\nNothing was written.");
}

}  // namespace

Box NamedTensor::box() const {
  const int64_t count = cut_dim >= 0 ? view.shape[cut_dim] : 0;
  Box box = cut_box(whole(), cut_dim, cut_begin, count);
  CHECK(box.size == view.shape, "{}: {} is not the part {} of {}", name, view.shape.str(), box.str(), whole().str());
  return box;
}

bool SavePlan::fits(std::span<const NamedTensor> tensors, const SaveRules& rules) const {
  return made_ && fingerprint_ == fingerprint_of(tensors, rules);
}

void SavePlan::make(std::span<const NamedTensor> tensors, const SaveRules& rules, const RankReports& reports) {
  std::vector<File> files[kKinds];
  std::vector<std::vector<Slice>> slices;
  const auto list = [&] {
    std::unordered_set<std::string_view> names;
    for (const NamedTensor& tensor : tensors) CHECK(names.insert(tensor.name).second, "{} twice", tensor.name);
    for (int kind = 0; kind < kKinds; ++kind) files[kind] = cut_files(tensors, rules, kind);
    return part_text(tensors, rules, files);
  };
  // Rank 0's answer: how many files of each kind every rank writes, so that they can be numbered.
  const auto judge = [&](const std::vector<std::string>& texts) {
    std::vector<Part> parts;
    for (const std::string& text : texts) parts.push_back(parse_part(text));
    check_complete(parts, rules);
    json counts = json::array();
    size_t before = 0;
    for (Part& part : parts) {
      counts.push_back({part.files[0], part.files[1]});
      for (Slice& slice : part.written) slice.file += before;
      before += part.files[0] + part.files[1];
      slices.push_back(std::move(part.written));
    }
    return counts.dump();
  };
  const json counts = json::parse(reports.agree(list, judge));
  reset();
  size_t all[kKinds] = {}, number[kKinds] = {};
  for (const json& rank : counts)
    for (size_t kind = 0; kind < kKinds; ++kind) all[kind] += rank[kind].get<size_t>();
  for (int rank = 0; rank < reports.size(); ++rank)
    for (size_t kind = 0; kind < kKinds; ++kind)
      for (size_t i = 0; i < counts[static_cast<size_t>(rank)][kind].get<size_t>(); ++i) {
        names_.push_back(fmt::format("{}-{:05}-of-{:05}.safetensors", kKindNames[kind], ++number[kind], all[kind]));
        if (rank != reports.rank()) continue;
        files_.push_back(std::move(files[kind][i]));
        files_.back().name = names_.back();
      }
  slices_ = std::move(slices);
  fingerprint_ = fingerprint_of(tensors, rules);
  made_ = true;
}

}  // namespace concerto
