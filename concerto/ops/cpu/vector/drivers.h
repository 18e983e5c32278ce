// What the drivers share: views as rows of bytes, the choice of table, and how much work makes a piece for a thread.
#pragma once

#include "concerto/ops/backend.h"
#include "concerto/ops/cpu/vector/kernel_table.h"

namespace concerto::cpu {

// Each fills the tables of its ops with the kernels of one instruction set.
void fill_norm(Backend& backend, Isa isa);
void fill_rope(Backend& backend, Isa isa);
void fill_swiglu(Backend& backend, Isa isa);
void fill_elementwise(Backend& backend, Isa isa);
void fill_embedding(Backend& backend, Isa isa);
void fill_permute(Backend& backend, Isa isa);
void fill_cross_entropy(Backend& backend, Isa isa);
void fill_router(Backend& backend, Isa isa);
void fill_routing(Backend& backend, Isa isa);
void fill_optimizer(Backend& backend, Isa isa);
void fill_attention(Backend& backend, Isa isa);

// A kernel pointer carries no state, so a driver is a class template over the instruction set:
// Driver<isa>::fill(backend).
template <template <Isa> class Driver>
void fill_for(Backend& backend, Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return Driver<Isa::kGeneric>::fill(backend);
    case Isa::kAvx2:
      return Driver<Isa::kAvx2>::fill(backend);
    case Isa::kAvx512:
      return Driver<Isa::kAvx512>::fill(backend);
    case Isa::kAvx512Bf16:
    case Isa::kAmxBf16:  // tiles are for products
      return Driver<Isa::kAvx512Bf16>::fill(backend);
  }
}

// The index of a compute type in the tables.
inline int type_index(DType type) {
  CHECK(type == DType::kF32 || type == DType::kBF16, "the cpu backend has no {}", dtype_name(type));
  return type == DType::kBF16 ? 1 : 0;
}

struct Rows {
  explicit Rows(const View& v)
      : data(static_cast<char*>(v.data)), element(dtype_bytes(v.dtype)), bytes(v.row_stride * dtype_bytes(v.dtype)) {}
  char* operator[](int64_t row) const { return data + row * bytes; }
  char* at(int64_t row, int64_t column) const { return data + row * bytes + column * element; }
  char* data;
  int64_t element, bytes;
};

// Rows that make a piece worth handing to another thread (some microseconds).
constexpr int64_t kPieceBytes = 32 << 10;
inline int64_t grain_rows(int64_t row_bytes) {
  return row_bytes >= kPieceBytes ? 1 : kPieceBytes / (row_bytes + 1) + 1;
}

// Elements of a fixed block of a long sum: its borders never move with the threads.
constexpr int64_t kSumBlock = 1 << 14;

inline int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace concerto::cpu
