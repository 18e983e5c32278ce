// Any bytes as lines of a JSONL training file: parse_record throws Error(kData) or gives a record whose conversation is
// whole.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "concerto/base/error.h"
#include "concerto/data/records.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(line.size() < rest.size() ? line.size() + 1 : rest.size());
    try {
      const concerto::Record record = concerto::parse_record(line, "fuzz.jsonl:1");
      if (record.conversation == record.turns.empty()) std::abort();
    } catch (const concerto::Error&) {
    }
  }
  return 0;
}
