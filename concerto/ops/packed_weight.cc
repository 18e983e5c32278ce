#include "concerto/ops/packed_weight.h"

#include "concerto/ops/checks.h"

namespace concerto {
namespace {

template <class T>
void pack_from(ThreadPool& pool, const T* from, const PackedWeight& to) {
  for_pieces(pool, to, [&](int64_t offset, int64_t rows, int64_t columns, const auto& pack) {
    PackingPiece room;
    bf16* piece = room.data();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c)
        piece[r * columns + c] = bf16(static_cast<float>(from[offset + r * to.k + c]));
    pack(piece);
  });
}

}  // namespace

int64_t packed_forward_bytes(const WeightPacking& packing, int64_t groups, int64_t n, int64_t k) {
  return groups * packing.forward_bytes(n, k);
}
int64_t packed_backward_bytes(const WeightPacking& packing, int64_t groups, int64_t n, int64_t k) {
  return groups * packing.backward_bytes(n, k);
}

void pack_weight(const Context& ctx, const PackWeight& args) {
  CHECK(args.to && args.to.packing->rows <= WeightPacking::kMostRows, "no packing, or pieces that are too high");
  CHECK(args.from.elements() == args.to.groups * args.to.n * args.to.k, "{} as [{}, {}, {}]", args.from.shape.str(),
        args.to.groups, args.to.n, args.to.k);
  check_dense(args.from, "pack_weight.from");
  check_memory(ctx, {args.from});
  if (ctx.dry_run) return;
  if (args.from.dtype == DType::kBF16)
    pack_from(*ctx.pool, args.from.as<bf16>(), args.to);
  else
    pack_from(*ctx.pool, args.from.as<float>(), args.to);
}

}  // namespace concerto
