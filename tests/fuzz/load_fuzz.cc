// Any bytes as an expert_load.bin, or as the bodies of its frames with lengths and check sums that are right: reading
// throws an Error or gives sums that fit each other.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "concerto/base/error.h"
#include "concerto/train/crc.h"
#include "concerto/train/load_series.h"

// A body is a length byte and so many bytes.
static std::string framed(std::string_view bodies) {
  std::string out = "CNCLOAD1";
  const auto put = [&](uint32_t v) {
    for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(v >> shift));
  };
  while (!bodies.empty()) {
    const std::string_view body = bodies.substr(1, static_cast<uint8_t>(bodies[0]));
    put(static_cast<uint32_t>(body.size()));
    put(concerto::crc32c(body));
    out += body;
    bodies.remove_prefix(1 + body.size());
  }
  return out;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string path = "/dev/shm/concerto-load-fuzz-" + std::to_string(::getpid());
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  std::ofstream(path, std::ios::binary) << (input.starts_with("CNC") ? std::string(input) : framed(input));
  try {
    const concerto::LoadSeries series = concerto::read_load_series(path, {});
    int64_t steps = 0;
    for (const int64_t n : series.steps_in_bin) steps += n;
    if (steps != series.steps || steps < 1 || series.layers.empty()) std::abort();
    for (const concerto::LayerSeries& layer : series.layers) {
      int64_t sum = 0;
      for (const int64_t n : layer.binned) sum += n;
      if (sum != layer.total.choices || layer.total.dropped > sum) std::abort();
    }
  } catch (const concerto::Error&) {
  }
  ::unlink(path.c_str());
  return 0;
}
