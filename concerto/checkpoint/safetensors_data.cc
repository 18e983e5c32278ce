// Conversion of elements, and the writer.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <unordered_set>

#include "concerto/base/json.h"
#include "concerto/checkpoint/safetensors.h"

namespace concerto {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;  // stays in the cache between convert, hash and write

struct f16 {
  uint16_t bits;
};

template <class T>
T load(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<From, bf16>)
    return convert<To>(static_cast<float>(value));
  else if constexpr (std::is_same_v<From, f16>)
    return convert<To>(f16_to_float(value.bits));
  else if constexpr (std::is_same_v<To, bf16>)
    return bf16(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, f16>)
    return f16{float_to_f16(static_cast<float>(value))};
  else
    return static_cast<To>(value);
}

template <class From, class To>
void convert_loop(const char* source, char* target, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const To value = convert<To>(load<From>(source + i * static_cast<int64_t>(sizeof(From))));
    std::memcpy(target + i * static_cast<int64_t>(sizeof(To)), &value, sizeof value);
  }
}

// f(T{}) with the element type of `dtype`.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kF64:
      return f(double{});
    case DType::kBF16:
      return f(bf16{});
    case DType::kF16:
      return f(f16{});
    case DType::kI32:
      return f(int32_t{});
    case DType::kI64:
      return f(int64_t{});
    case DType::kU8:
      return f(uint8_t{});
  }
}

}  // namespace

bool can_convert(DType from, DType to) {
  if (from == to || is_float(to)) return true;
  return !is_float(from) && dtype_bytes(from) < dtype_bytes(to);
}

void convert_elements(const void* source, DType from, void* target, DType to, int64_t n) {
  CHECK(can_convert(from, to), "{} to {}", dtype_name(from), dtype_name(to));
  if (n <= 0) return;
  const char* in = static_cast<const char*>(source);
  char* out = static_cast<char*>(target);
  if (from == to) {
    std::memcpy(out, in, static_cast<size_t>(n * dtype_bytes(from)));
    return;
  }
  with_type(from, [&]<class From>(From) {
    with_type(to, [&]<class To>(To) {
      constexpr bool to_integer = std::is_integral_v<To>;
      if constexpr (!to_integer || (std::is_integral_v<From> && sizeof(From) < sizeof(To)))
        convert_loop<From, To>(in, out, n);
    });
  });
}

void copy_tensor(const SafetensorsEntry& entry, const View& target, Hash64* hash) {
  CHECK(target.dense() && target.elements() == entry.shape.elements(), "{} {} into {}", entry.name, entry.shape.str(),
        target.shape.str());
  if (!can_convert(entry.dtype, target.dtype))
    throw Error(ErrorCode::kModel, "tensor " + json_quote(entry.name),
                fmt::format("has dtype {}, {} was expected", safetensors_dtype_name(entry.dtype),
                            safetensors_dtype_name(target.dtype)));
  const int64_t from_bytes = dtype_bytes(entry.dtype), to_bytes = dtype_bytes(target.dtype);
  const int64_t step = kChunkBytes / from_bytes, n = target.elements();
  for (int64_t at = 0; at < n; at += step) {
    const int64_t count = std::min(step, n - at);
    const std::byte* source = entry.data + at * from_bytes;
    if (hash) hash->update(source, static_cast<size_t>(count * from_bytes));
    convert_elements(source, entry.dtype, static_cast<char*>(target.data) + at * to_bytes, target.dtype, count);
  }
}

SafetensorsLayout::SafetensorsLayout(std::vector<TensorInfo> infos, const std::map<std::string, std::string>& metadata)
    : tensors(std::move(infos)) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::string text = header.dump();
  text.pop_back();  // entries are appended as text: an ordered_json of 100,000 names looks each one up in a line
  std::unordered_set<std::string_view> names;
  int64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    CHECK(names.insert(tensor.name).second && tensor.name != "__metadata__", "tensor {} twice", tensor.name);
    const int64_t size = tensor.shape.elements() * dtype_bytes(tensor.dtype);
    text += text.size() > 1 ? "," : "";
    text += json_quote(tensor.name);
    text += fmt::format(":{{\"dtype\":\"{}\",\"shape\":[", safetensors_dtype_name(tensor.dtype));
    for (int i = 0; i < tensor.shape.rank(); ++i) text += fmt::format("{}{}", i ? "," : "", tensor.shape[i]);
    text += fmt::format("],\"data_offsets\":[{},{}]}}", offset, offset + size);
    offsets.push_back(offset);
    offset += size;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  head.assign(reinterpret_cast<const char*>(&length), sizeof length);
  head += text;
  for (int64_t& at : offsets) at += static_cast<int64_t>(head.size());
  bytes = static_cast<int64_t>(head.size()) + offset;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), layout_(std::move(tensors), metadata), header_hash_(hash64(layout_.head)) {
  file_ = std::make_unique<FileWriter>(path_ + ".tmp");
  try {
    file_->write(layout_.head.data(), layout_.head.size());
  } catch (...) {
    remove_tree(path_ + ".tmp");  // no destructor runs for a constructor that threw
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (finished_) return;
  file_.reset();
  std::remove((path_ + ".tmp").c_str());
}

uint64_t SafetensorsWriter::write(const View& source) {
  CHECK(next_ < tensors().size(), "{}: all tensors are written", path_);
  const TensorInfo& tensor = tensors()[next_++];
  CHECK(source.dense() && source.elements() == tensor.shape.elements(), "{} {} from {}", tensor.name,
        tensor.shape.str(), source.shape.str());
  CHECK(can_convert(source.dtype, tensor.dtype), "{}: {} to {}", tensor.name, dtype_name(source.dtype),
        dtype_name(tensor.dtype));
  const bool same = source.dtype == tensor.dtype;
  const int64_t from_bytes = dtype_bytes(source.dtype), to_bytes = dtype_bytes(tensor.dtype);
  const int64_t step = kChunkBytes / to_bytes, n = source.elements();
  if (!same) chunk_.resize(kChunkBytes);
  Hash64 hash;
  for (int64_t at = 0; at < n; at += step) {
    const int64_t count = std::min(step, n - at);
    const char* piece = static_cast<const char*>(source.data) + at * from_bytes;
    if (!same) {
      convert_elements(piece, source.dtype, chunk_.data(), tensor.dtype, count);
      piece = chunk_.data();
    }
    hash.update(piece, static_cast<size_t>(count * to_bytes));
    file_->write(piece, static_cast<size_t>(count * to_bytes));
  }
  return hash.digest();
}

void SafetensorsWriter::finish() {
  CHECK(next_ == tensors().size(), "{}: {} of {} tensors written", path_, next_, tensors().size());
  file_->finish();
  rename_path(path_ + ".tmp", path_);
  finished_ = true;
}

}  // namespace concerto
