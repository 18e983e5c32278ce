// The two kinds of exception of Concerto. `Error`: the world is wrong (config, data, files, memory, numbers); it says
// what, where and how to mend it, and maps to an exit code. `Bug`, thrown by CHECK: we are wrong.
#pragma once

#include <fmt/format.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace concerto {

// The value is the exit code of the command (docs/errors.md).
enum class ErrorCode {
  kUsage = 2,        // command line
  kConfig = 3,       // a config file or a setting
  kData = 4,         // training data, tokenizer files, JSONL
  kModel = 5,        // model folder: config.json, safetensors
  kCheckpoint = 6,   // a checkpoint or run folder
  kIo = 7,           // operating system: missing file, no permission, disk full
  kNumeric = 8,      // loss NaN or spike, gradient not finite, golden mismatch
  kMemory = 9,       // does not fit
  kComm = 10,        // ranks and network
  kUnsupported = 11  // backend or processor lacks something
};

const char* error_code_name(ErrorCode code);

struct Error : std::runtime_error {
  // `where`: key, file:line or tensor name. `what`: got and wanted. `fix`: a value or a command; may be empty.
  Error(ErrorCode code, std::string where, std::string what, std::string fix = "");
  ErrorCode code;
  std::string where, problem, fix;
};

struct Bug : std::logic_error {
  using std::logic_error::logic_error;
};

[[noreturn]] void check_failed(const char* expression, const std::string& message, std::source_location location);

}  // namespace concerto

// CHECK(x == y) or CHECK(x == y, "x {} y {}", x, y).
#define CHECK(condition, ...)                                                                                        \
  do {                                                                                                               \
    if (!(condition)) [[unlikely]]                                                                                   \
      ::concerto::check_failed(#condition, ::concerto::check_message(__VA_ARGS__), std::source_location::current()); \
  } while (false)

namespace concerto {
inline std::string check_message() { return {}; }
template <class... Args>
std::string check_message(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}
}  // namespace concerto
