// Any bytes are a safetensors file or an Error; what is accepted can be copied out in every type without touching
// foreign memory.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "concerto/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace concerto;
  try {
    const SafetensorsHeader header = parse_safetensors(std::as_bytes(std::span(data, size)), "input");
    int64_t bytes = header.header_bytes;
    for (const SafetensorsEntry& entry : header.entries) {
      bytes += entry.bytes;
      // No larger than a multiple of the input, however large the shape claims to be.
      std::vector<double> values(static_cast<size_t>(entry.shape.elements()));
      for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI64})
        if (can_convert(entry.dtype, dtype)) copy_tensor(entry, View(values.data(), entry.shape, dtype));
    }
    if (bytes != static_cast<int64_t>(size)) std::abort();  // accepted, though not every byte is accounted for
  } catch (const Error& e) {
    if (e.code != ErrorCode::kModel) throw;
  }
  return 0;
}
