// A view: pointer, shape (rank <= 4), row stride, dtype. Non-owning and trivially copyable, passed by value. The last
// dim is contiguous; the rows of a view (all dims but the last, flattened) are `row_stride` elements apart. Owners are
// Buffer and Arena.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "concerto/base/dtype.h"
#include "concerto/base/error.h"

namespace concerto {

enum class Device : uint8_t { kCpu, kCuda };

// An ordered queue of device work. On the CPU, null: work is done when the call returns.
struct Stream {
  void* handle = nullptr;
};

class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    CHECK(dims.size() <= kMaxRank);
    for (int64_t d : dims) dims_[rank_++] = d;
  }
  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  void push_back(int64_t d) {
    CHECK(rank_ < kMaxRank);
    dims_[rank_++] = d;
  }
  bool operator==(const Shape& o) const {
    if (rank_ != o.rank_) return false;
    for (int i = 0; i < rank_; ++i)
      if (dims_[i] != o.dims_[i]) return false;
    return true;
  }
  std::string str() const;  // "[3, 4]"

 private:
  int64_t dims_[kMaxRank] = {0, 0, 0, 0};
  int rank_ = 0;
};

struct View {
  void* data = nullptr;
  Shape shape;
  int64_t row_stride = 0;  // elements between rows; equals the last dim when dense
  DType dtype = DType::kF32;
  Device device = Device::kCpu;

  View() = default;
  View(void* data, Shape shape, DType dtype)
      : data(data), shape(shape), row_stride(shape.rank() ? shape[shape.rank() - 1] : 1), dtype(dtype) {}

  // Is there a tensor at all? (In a dry run a tensor that is there has no memory.)
  explicit operator bool() const { return shape.rank() != 0; }
  int64_t dim(int i) const { return shape[i]; }
  int64_t cols() const { return shape.rank() ? shape[shape.rank() - 1] : 1; }
  int64_t rows() const { return cols() ? shape.elements() / cols() : 0; }
  int64_t elements() const { return shape.elements(); }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
  bool dense() const { return row_stride == cols() || rows() <= 1; }

  // The element pointer; checks the type.
  template <class T>
  T* as() const {
    CHECK(dtype == dtype_of<std::remove_const_t<T>>(), "view is {}", dtype_name(dtype));
    return static_cast<T*>(data);
  }
  // Rows [begin, begin + count) as a rank-2 view. Keeps a null pointer null.
  View rows_range(int64_t begin, int64_t count) const {
    View v = *this;
    v.shape = Shape{count, cols()};
    if (data) v.data = static_cast<char*>(data) + begin * row_stride * dtype_bytes(dtype);
    return v;
  }
  // Columns [begin, begin + count) of every row, as a strided rank-2 view.
  View cols_range(int64_t begin, int64_t count) const {
    View v = *this;
    v.shape = Shape{rows(), count};
    if (data) v.data = static_cast<char*>(data) + begin * dtype_bytes(dtype);
    return v;
  }
  View reshape(Shape s) const {
    CHECK(dense() && s.elements() == elements(), "{} to {}", shape.str(), s.str());
    View v(data, s, dtype);
    v.device = device;
    return v;
  }
};
static_assert(std::is_trivially_copyable_v<View>);

}  // namespace concerto
