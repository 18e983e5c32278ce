// libFuzzer target: any text is a config or an Error. CHECK failures, other exceptions and sanitizer findings end the
// run.
#include <cstddef>
#include <cstdint>
#include <string>

#include "concerto/base/error.h"
#include "concerto/config/run_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::string yaml;
  try {
    yaml = concerto::run_config_yaml(concerto::parse_run_config(text, "fuzz.yaml", {}));
  } catch (const concerto::Error&) {
    return 0;
  }
  // What was read can be written, and reads back to the same.
  CHECK(concerto::run_config_yaml(concerto::parse_run_config(yaml, "again.yaml", {})) == yaml);
  return 0;
}
