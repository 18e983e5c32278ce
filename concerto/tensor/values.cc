#include "concerto/tensor/values.h"

#include <cmath>

namespace concerto {
namespace {

template <class T, class F>
void each(View v, F&& f) {
  for (int64_t r = 0; r < v.rows(); ++r) {
    const T* row = v.rows_range(r, 1).as<T>();
    for (int64_t c = 0; c < v.cols(); ++c) {
      if constexpr (std::is_same_v<T, bf16>)
        f(static_cast<double>(static_cast<float>(row[c])));
      else
        f(static_cast<double>(row[c]));
    }
  }
}

template <class F>
void each_value(View v, F&& f) {
  switch (v.dtype) {
    case DType::kF32:
      return each<float>(v, f);
    case DType::kF64:
      return each<double>(v, f);
    case DType::kBF16:
      return each<bf16>(v, f);
    case DType::kI32:
      return each<int32_t>(v, f);
    case DType::kI64:
      return each<int64_t>(v, f);
    default:
      CHECK(false, "{}", dtype_name(v.dtype));
  }
}

}  // namespace

std::vector<double> to_doubles(View v) {
  std::vector<double> out;
  out.reserve(static_cast<size_t>(v.elements()));
  each_value(v, [&](double x) { out.push_back(x); });
  return out;
}

bool all_finite(View v) {
  if (v.dtype != DType::kF32 && v.dtype != DType::kF64 && v.dtype != DType::kBF16) return true;
  bool finite = true;
  each_value(v, [&](double x) { finite = finite && std::isfinite(x); });
  return finite;
}

}  // namespace concerto
