// Weights of products in the order in which a backend's kernels read them, packed once when they change and not in
// every product. A backend that has such an order gives a WeightPacking with its products; whoever keeps the weights
// (params/parameter_store.h) then keeps them packed, twice, and not as the matrix: for y = x W^T (`forward`) and for
// dx = dy W (`backward`).
#pragma once

#include <cstddef>

#include "concerto/ops/context.h"

namespace concerto {

// bf16 matrices [n, k].
struct WeightPacking {
  // Columns of one piece at most; its rows are `rows` or those that are left. Pieces begin at multiples of both and may
  // be packed in any order, by any thread.
  static constexpr int64_t kColumns = 512, kMostRows = 64;
  int64_t rows = 0;  // at most kMostRows
  int64_t (*forward_bytes)(int64_t n, int64_t k) = nullptr;
  int64_t (*backward_bytes)(int64_t n, int64_t k) = nullptr;
  // piece: [rows, columns], dense, from (row, column) of the matrix on.
  void (*pack)(const bf16* piece, int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t n, int64_t k,
               char* forward, char* backward) = nullptr;
};

// Where [groups, n, k] lies packed; null: it lies as it is.
struct PackedWeight {
  const WeightPacking* packing = nullptr;
  int64_t groups = 0, n = 0, k = 0;
  char *forward = nullptr, *backward = nullptr;  // at multiples of kAlignment bytes
  explicit operator bool() const { return packing != nullptr; }
};

// Bytes of the two forms of [groups, n, k].
int64_t packed_forward_bytes(const WeightPacking& packing, int64_t groups, int64_t n, int64_t k);
int64_t packed_backward_bytes(const WeightPacking& packing, int64_t groups, int64_t n, int64_t k);

// Room for a piece, not set to anything.
struct PackingPiece {
  alignas(64) std::byte bytes[WeightPacking::kMostRows * WeightPacking::kColumns * sizeof(bf16)];
  bf16* data() { return reinterpret_cast<bf16*>(bytes); }
};

// Calls piece(offset in [groups, n, k], rows, columns, pack) for all pieces on the threads of the pool;
// pack(const bf16*) packs the piece from dense rows. Contiguous runs of rows go to one thread.
template <class Piece>
void for_pieces(ThreadPool& pool, const PackedWeight& w, const Piece& piece) {
  const WeightPacking& p = *w.packing;
  const int64_t blocks = (w.n + p.rows - 1) / p.rows, forward = p.forward_bytes(w.n, w.k),
                backward = p.backward_bytes(w.n, w.k);
  pool.parallel_for(w.groups * blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / blocks, row = i % blocks * p.rows, rows = row + p.rows < w.n ? p.rows : w.n - row;
      for (int64_t column = 0; column < w.k; column += WeightPacking::kColumns) {
        const int64_t columns = column + WeightPacking::kColumns < w.k ? WeightPacking::kColumns : w.k - column;
        piece((e * w.n + row) * w.k + column, rows, columns, [&](const bf16* from) {
          p.pack(from, row, rows, column, columns, w.n, w.k, w.forward + e * forward, w.backward + e * backward);
        });
      }
    }
  });
}

// Packs [groups, n, k] from bf16, or from f32 rounded once.
struct PackWeight {
  View from;  // dense, groups * n * k elements
  PackedWeight to;
};
void pack_weight(const Context& ctx, const PackWeight& args);

}  // namespace concerto
