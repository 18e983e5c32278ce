#include "concerto/ops/ref/kernels.h"
#include "concerto/ops/ref/ref_backend.h"

namespace concerto {
namespace ref {

void check_offsets(const View& offsets, int64_t rows, bool all_rows) {
  const auto* o = offsets.as<int32_t>();
  const int64_t groups = offsets.dim(0) - 1;
  CHECK(o[0] == 0 && o[groups] <= rows, "offsets from {} to {}, {} rows", o[0], o[groups], rows);
  CHECK(!all_rows || o[groups] == rows, "offsets end at {}, {} rows", o[groups], rows);
  for (int64_t g = 0; g < groups; ++g) CHECK(o[g] <= o[g + 1], "offsets fall from {} to {} at {}", o[g], o[g + 1], g);
}

void check_ids(const View& ids, int64_t end, const char* name) {
  for (int64_t r = 0; r < ids.rows(); ++r)
    for (int64_t c = 0; c < ids.cols(); ++c) {
      const int32_t id = row_of<int32_t>(ids, r)[c];
      CHECK(id >= 0 && id < end, "{}: {} is not in [0, {})", name, id, end);
    }
}

}  // namespace ref

const Backend& ref_backend() {
  static const Backend backend{.name = "ref",
                               .f32 = true,
                               .bf16 = true,
                               .f64 = true,
                               .linear = ref::linear(),
                               .grouped_linear = ref::grouped_linear(),
                               .rms_norm = ref::rms_norm(),
                               .rope = ref::rope(),
                               .attention = ref::attention(),
                               .swiglu = ref::swiglu(),
                               .embedding = ref::embedding(),
                               .router = ref::router(),
                               .routing = ref::routing(),
                               .permute = ref::permute(),
                               .cross_entropy = ref::cross_entropy(),
                               .elementwise = ref::elementwise(),
                               .optimizer = ref::optimizer()};
  return backend;
}

}  // namespace concerto
