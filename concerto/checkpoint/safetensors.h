// The safetensors format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}, "__metadata__":
// {text: text}}, then the bytes of the tensors without gap or overlap, little endian.
//
// Reading trusts nothing: every length, offset, shape and name is checked against the file before use, and each fault
// is an Error(kModel) that names the file and the tensor. Tensors stay in the mapped file until copied out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "concerto/base/files.h"
#include "concerto/base/hash.h"
#include "concerto/tensor/view.h"

namespace concerto {

std::string_view safetensors_dtype_name(DType dtype);  // "BF16"

// One tensor of an open file. `data` points into it and may be unaligned for the type: read it through copy_tensor or
// memcpy.
struct SafetensorsEntry {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;  // BOOL is read as kU8
  const std::byte* data = nullptr;
  int64_t bytes = 0;
};

// A parsed header: entries in file order (by offset).
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  int64_t header_bytes = 0;  // with the 8 bytes of length
};

// Parses a whole file that lies in memory; the entries point into it. `file` is for messages.
SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;
  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(std::string_view name) const;     // null if it is not there
  const SafetensorsEntry& require(std::string_view name) const;  // Error(kModel) if it is not there
  uint64_t header_hash() const;                                  // of everything before the tensors
  int64_t bytes() const { return static_cast<int64_t>(map_.bytes().size()); }

 private:
  std::string path_;
  MappedFile map_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> index_;
};

// Copies a tensor into `target` (dense, same number of elements), converting between f32, f64, bf16 and f16 with
// rounding to nearest (f64 goes through f32 to reach 16 bits). Integers may widen, and may be read as floats; anything
// else is an Error(kModel) naming the tensor. If `hash` is given, the file's bytes of the tensor go into it in the same
// pass.
void copy_tensor(const SafetensorsEntry& entry, const View& target, Hash64* hash = nullptr);
// The same conversions between any two dense buffers of n elements; `source` may be unaligned.
void convert_elements(const void* source, DType from, void* target, DType to, int64_t n);
bool can_convert(DType from, DType to);
inline bool is_float(DType t) { return t == DType::kF32 || t == DType::kF64 || t == DType::kBF16 || t == DType::kF16; }

struct TensorInfo {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;
};

// Called with the tensors that are done and all there are, now and then on the caller's thread.
using TensorProgress = std::function<void(int64_t done, int64_t total)>;

// A file as it will be, known before a byte of the tensors is: larger element types come first, so that every tensor is
// aligned for its type (PyTorch refuses others).
struct SafetensorsLayout {
  SafetensorsLayout(std::vector<TensorInfo> tensors, const std::map<std::string, std::string>& metadata);
  std::vector<TensorInfo> tensors;  // in the order of the file
  std::vector<int64_t> offsets;     // of each, from the beginning of the file
  std::string head;                 // the bytes before the tensors
  int64_t bytes = 0;                // of the whole file
};

// Writes a file tensor by tensor with bounded memory, under PATH.tmp until finish(); tensors() is the order in which
// write() wants them.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();  // removes the temporary file unless finished
  const std::vector<TensorInfo>& tensors() const { return layout_.tensors; }
  // The next tensor of tensors(), from a dense view of the same number of elements, converted to the declared type.
  // Returns the hash of its bytes in the file.
  uint64_t write(const View& source);
  void finish();  // all tensors written: sync and rename; the folder is the caller's to sync
  uint64_t header_hash() const { return header_hash_; }
  int64_t bytes() const { return file_->bytes(); }

 private:
  std::string path_;
  SafetensorsLayout layout_;
  std::unique_ptr<FileWriter> file_;
  std::vector<char> chunk_;
  size_t next_ = 0;
  uint64_t header_hash_ = 0;
  bool finished_ = false;
};

}  // namespace concerto
