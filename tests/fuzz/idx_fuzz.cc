// Any bytes as an .idx file: TokenIndex throws Error(kData) or gives documents that lie within the .bin file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "concerto/base/error.h"
#include "concerto/data/indexed_dataset.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kBinBytes = 4096;
  try {
    const concerto::TokenIndex index({data, size}, kBinBytes, "fuzz.idx");
    int64_t tokens = 0;
    for (int64_t d = 0; d < index.documents(); ++d) {
      const auto range = index.document(d);
      if (range.begin < 0 || range.count < 0 || (range.begin + range.count) * index.type_bytes() > kBinBytes)
        std::abort();
      tokens += range.count;
    }
    if (tokens != index.tokens()) std::abort();
  } catch (const concerto::Error&) {
  }
  return 0;
}
