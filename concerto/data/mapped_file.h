// A file mapped read-only into memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace concerto {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // Error(kIo) when it cannot be opened
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<const uint8_t> bytes() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace concerto
