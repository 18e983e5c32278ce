#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "concerto/tensor/arena.h"
#include "concerto/tensor/view.h"

namespace concerto {

std::string Shape::str() const {
  std::string s = "[";
  for (int i = 0; i < rank_; ++i) s += (i ? ", " : "") + std::to_string(dims_[i]);
  return s + "]";
}

Buffer::Buffer(int64_t bytes, MemoryUse use) : bytes_(bytes) {
  CHECK(bytes >= 0, "{}: {} bytes", use.where, bytes);
  if (bytes == 0) return;
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    throw Error(ErrorCode::kMemory, use.where,
                fmt::format("cannot get {} bytes ({:.1f} GiB) of memory", bytes, static_cast<double>(bytes) / 0x1p30),
                use.fix);
  // Huge pages matter for arrays read end to end (weights, moments); a refusal costs only speed.
  if (bytes >= (4 << 20)) madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  data_ = static_cast<char*>(p);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

Buffer::Buffer(Buffer&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

void* Arena::take_bytes(int64_t bytes) {
  const int64_t at = used_;
  used_ += align_up(bytes);
  if (counting_ && used_ > high_water_) growth_.push_back({at, used_, high_water_});
  if (used_ > high_water_) high_water_ = used_;
  if (counting_) return nullptr;
  if (used_ > buffer_.bytes()) {
    used_ = at;
    throw Error(ErrorCode::kMemory, "arena",
                fmt::format("{} bytes wanted, {} of {} in use", bytes, at, buffer_.bytes()),
                "This is more than the run was planned for; please report the config.");
  }
  return buffer_.data() + at;
}

View Arena::take(Shape shape, DType dtype) {
  return View(take_bytes(shape.elements() * dtype_bytes(dtype)), shape, dtype);
}

void Arena::release(int64_t mark) {
  CHECK(mark <= used_);
  if (poison_ && !counting_ && mark < used_)
    std::memset(buffer_.data() + mark, 0xff, static_cast<size_t>(used_ - mark));
  used_ = mark;
}

void Arena::poison() {
  poison_ = true;
  if (!counting_ && buffer_.data())
    std::memset(buffer_.data() + used_, 0xff, static_cast<size_t>(buffer_.bytes() - used_));
}

}  // namespace concerto
