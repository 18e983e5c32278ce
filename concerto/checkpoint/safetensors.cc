#include "concerto/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "concerto/base/json.h"

namespace concerto {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int kMaxHeaderDepth = 4;                // {name: {shape: [..]}} is 3

struct NamedType {
  std::string_view name;
  DType dtype;
};
constexpr NamedType kTypes[] = {{"F32", DType::kF32}, {"BF16", DType::kBF16}, {"F16", DType::kF16},
                                {"F64", DType::kF64}, {"I32", DType::kI32},   {"I64", DType::kI64},
                                {"U8", DType::kU8},   {"BOOL", DType::kU8}};

[[noreturn]] void fail(const std::string& file, const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kModel, file + (name.empty() ? "" : ": tensor " + json_quote(name)), what,
              "Copy or download the file again, or name another.");
}

std::optional<uint64_t> unsigned_value(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<uint64_t>();
}

Shape parse_shape(const json& value, const std::string& file, const std::string& name) {
  if (!value.is_array()) fail(file, name, "\"shape\" is not a list");
  if (value.size() > Shape::kMaxRank)
    fail(file, name, fmt::format("has {} dims, at most {} are supported", value.size(), Shape::kMaxRank));
  Shape shape;
  for (const json& dim : value) {
    const auto d = unsigned_value(dim);
    if (!d || *d > static_cast<uint64_t>(INT64_MAX))
      fail(file, name, "a dim of \"shape\" is not a whole number from 0");
    shape.push_back(static_cast<int64_t>(*d));
  }
  return shape;
}

// elements * size, or none when it does not fit: a shape from a file is only a claim.
std::optional<int64_t> checked_bytes(const Shape& shape, DType dtype) {
  int64_t bytes = dtype_bytes(dtype);
  bool empty = false, overflow = false;
  for (int i = 0; i < shape.rank(); ++i) {
    empty |= shape[i] == 0;
    overflow |= __builtin_mul_overflow(bytes, std::max<int64_t>(shape[i], 1), &bytes);
  }
  if (overflow) return std::nullopt;
  return empty ? 0 : bytes;
}

struct Extent {
  uint64_t begin, end;
};

Extent parse_entry(const std::string& name, const json& value, const std::string& file, uint64_t data_bytes,
                   SafetensorsEntry& entry) {
  if (!value.is_object()) fail(file, name, "its header entry is not an object");
  for (const auto& [key, unused] : value.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      fail(file, name, "unknown key " + json_quote(key) + " in its header entry");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!value.contains(key)) fail(file, name, fmt::format("no \"{}\" in its header entry", key));

  const json& dtype = value["dtype"];
  if (!dtype.is_string()) fail(file, name, "\"dtype\" is not a string");
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const NamedType& t) { return t.name == dtype.get_ref<const std::string&>(); });
  if (type == std::end(kTypes))
    fail(file, name,
         "has dtype " + json_quote(dtype.get_ref<const std::string&>()) +
             "; F64, F32, F16, BF16, I64, I32, U8 and BOOL are supported");
  entry.name = name;
  entry.dtype = type->dtype;
  entry.shape = parse_shape(value["shape"], file, name);

  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail(file, name, "\"data_offsets\" is not a list of two numbers");
  const auto begin = unsigned_value(offsets[0]), end = unsigned_value(offsets[1]);
  if (!begin || !end || *begin > *end) fail(file, name, "\"data_offsets\" are not begin <= end");
  if (*end > data_bytes)
    fail(file, name, fmt::format("ends at byte {} of the data, which has {}: the file is truncated", *end, data_bytes));
  const auto bytes = checked_bytes(entry.shape, entry.dtype);
  if (!bytes || static_cast<uint64_t>(*bytes) != *end - *begin)
    fail(file, name,
         fmt::format("shape {} of {} does not have the {} bytes of its offsets", entry.shape.str(), type->name,
                     *end - *begin));
  entry.bytes = *bytes;
  return {*begin, *end};
}

}  // namespace

std::string_view safetensors_dtype_name(DType dtype) {
  for (const NamedType& type : kTypes)
    if (type.dtype == dtype) return type.name;
  return "?";
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  if (bytes.size() < 8) fail(file, "", fmt::format("has {} bytes: too short for a safetensors file", bytes.size()));
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > bytes.size() - 8)
    fail(file, "",
         fmt::format("claims a header of {} bytes but has {}: truncated or not safetensors", length, bytes.size()));
  if (length > kMaxHeaderBytes)
    fail(file, "", fmt::format("header of {} bytes is over the limit of {}", length, kMaxHeaderBytes));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, length);
  if (!text.starts_with('{')) fail(file, "", "the header does not start with '{': not a safetensors file");
  const json header = parse_json(text, ErrorCode::kModel, file, kMaxHeaderDepth);

  SafetensorsHeader result;
  result.header_bytes = static_cast<int64_t>(8 + length);
  const uint64_t data_bytes = bytes.size() - 8 - length;
  struct Placed {
    Extent extent;
    SafetensorsEntry entry;
  };
  std::vector<Placed> placed;
  placed.reserve(header.size());
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) fail(file, "", "\"__metadata__\" is not an object");
      for (const auto& [key, text_value] : value.items()) {
        if (!text_value.is_string())
          fail(file, "", "\"__metadata__\" value of " + json_quote(key) + " is not a string");
        result.metadata[key] = text_value.get<std::string>();
      }
      continue;
    }
    Placed item;
    item.extent = parse_entry(name, value, file, data_bytes, item.entry);
    placed.push_back(std::move(item));
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tuple(a.extent.begin, a.extent.end, std::string_view(a.entry.name)) <
           std::tuple(b.extent.begin, b.extent.end, std::string_view(b.entry.name));
  });
  uint64_t at = 0;
  for (Placed& item : placed) {
    if (item.extent.begin != at)
      fail(file, item.entry.name,
           fmt::format("starts at byte {} of the data, where {} was expected: {}", item.extent.begin, at,
                       item.extent.begin < at ? "tensors overlap" : "there is a hole"));
    at = item.extent.end;
    item.entry.data = bytes.data() + result.header_bytes + item.extent.begin;
    result.entries.push_back(std::move(item.entry));
  }
  if (at != data_bytes) fail(file, "", fmt::format("{} bytes follow the last tensor", data_bytes - at));
  return result;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), map_(path), header_(parse_safetensors(map_.bytes(), path)) {
  index_.reserve(header_.entries.size());
  for (size_t i = 0; i < header_.entries.size(); ++i) index_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &header_.entries[it->second];
}

const SafetensorsEntry& SafetensorsFile::require(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (!entry) fail(path_, std::string(name), "is missing");
  return *entry;
}

uint64_t SafetensorsFile::header_hash() const {
  return hash64(map_.bytes().data(), static_cast<size_t>(header_.header_bytes));
}

}  // namespace concerto
