#include "concerto/comm/rank_order_sum.h"

#include <cstring>

namespace concerto {
namespace {

template <class T, class Sum, class Read>
void add_as(Sum* sum, const Piece& part, bool first, Read read) {
  const T* values = reinterpret_cast<const T*>(part.data);
  if (first)
    for (int64_t i = 0; i < part.elements; ++i) sum[i] = read(values[i]);
  else
    for (int64_t i = 0; i < part.elements; ++i) sum[i] += read(values[i]);
}

}  // namespace

void RankOrderSum::add(const Piece& part, bool first, bool round) {
  const auto as_is = [](auto x) { return x; };
  switch (part.dtype) {
    case DType::kF32:
      if (round)
        add_as<float>(sum_.f32, part, first, [](float x) { return static_cast<float>(bf16(x)); });
      else
        add_as<float>(sum_.f32, part, first, as_is);
      return;
    case DType::kBF16:
      add_as<bf16>(sum_.f32, part, first, [](bf16 x) { return static_cast<float>(x); });
      return;
    case DType::kF64:
      add_as<double>(sum_.f64, part, first, as_is);
      return;
    case DType::kI32:  // counts; beyond the type they wrap, as any order would
      add_as<uint32_t>(sum_.u32, part, first, as_is);
      return;
    case DType::kI64:
      add_as<uint64_t>(sum_.u64, part, first, as_is);
      return;
    default:
      CHECK(false, "sum of {}", dtype_name(part.dtype));
  }
}

void RankOrderSum::store(const Piece& out) const {
  if (out.dtype != DType::kBF16) {
    std::memcpy(out.data, &sum_, static_cast<size_t>(out.bytes()));
    return;
  }
  bf16* values = reinterpret_cast<bf16*>(out.data);
  const float* from = sum_.f32;
  for (int64_t i = 0; i < out.elements; ++i) values[i] = bf16(from[i]);
}

}  // namespace concerto
