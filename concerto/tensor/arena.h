// Owners of memory. `Buffer`: one aligned block for the life of a run. `Arena`: a bump allocator over a Buffer with a
// high-water mark, reset by whoever owns the lifetime (micro-batch, call). Neither allocates after construction.
//
// A *counting* arena has no memory: take() returns views with a null pointer and only moves the mark. Running a step on
// counting arenas with `Context::dry_run` is how memory is predicted before a run: same code, same order, exact bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

constexpr int64_t kAlignment = 64;
constexpr int64_t align_up(int64_t bytes, int64_t to = kAlignment) { return (bytes + to - 1) / to * to; }

// What memory is for: names it in an error, and says how to need less of it.
struct MemoryUse {
  const char* where = "buffer";
  const char* fix = "Use a smaller model, or a machine with more memory.";
};

class Buffer {
 public:
  Buffer() = default;
  // Page-aligned and zeroed by the kernel on first touch; Error(kMemory) if it cannot be had.
  explicit Buffer(int64_t bytes, MemoryUse use = {});
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

constexpr MemoryUse kArenaUse = {
    "arena", "Use a smaller training.micro_batch_size or seq_length, or parallel.recompute: full, or a smaller model."};

class Arena {
 public:
  Arena() : counting_(true) {}  // counting arena
  explicit Arena(int64_t bytes) : buffer_(bytes, kArenaUse), counting_(false) {}

  // Contents are undefined (tests poison them with NaN). Error(kMemory) when full.
  View take(Shape shape, DType dtype);
  void* take_bytes(int64_t bytes);

  int64_t mark() const { return used_; }
  void release(int64_t mark);  // back to an earlier mark(); in poison mode fills what was released
  void reset() { release(0); }
  int64_t high_water() const { return high_water_; }
  int64_t capacity() const { return buffer_.bytes(); }
  bool counting() const { return counting_; }
  // Of a counting arena: what was taken that reached beyond all before, in the order of places. The arena that is made
  // after it will be used so.
  struct Growth {
    int64_t begin, end, fresh;  // bytes; `fresh`: the mark before
  };
  const std::vector<Growth>& growth() const { return growth_; }
  char* data() const { return buffer_.data(); }
  void poison();  // fills the free part with NaN bytes (0xff) now and at every release
 private:
  Buffer buffer_;
  std::vector<Growth> growth_;
  int64_t used_ = 0, high_water_ = 0;
  bool counting_, poison_ = false;
};

// Gives back on leaving the scope what was taken inside it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  int64_t mark_;
};

}  // namespace concerto
