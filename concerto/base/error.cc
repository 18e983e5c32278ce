#include "concerto/base/error.h"

#include <string_view>

namespace concerto {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
      return "usage";
    case ErrorCode::kConfig:
      return "config";
    case ErrorCode::kData:
      return "data";
    case ErrorCode::kModel:
      return "model";
    case ErrorCode::kCheckpoint:
      return "checkpoint";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kNumeric:
      return "numeric";
    case ErrorCode::kMemory:
      return "memory";
    case ErrorCode::kComm:
      return "comm";
    case ErrorCode::kUnsupported:
      return "unsupported";
  }
  return "unknown";
}

static std::string join(const std::string& where, const std::string& what, const std::string& fix) {
  std::string text = where.empty() ? what : where + ": " + what;
  // After a list of lines the fix gets a line of its own.
  if (!fix.empty()) text += (fix.starts_with('\n') ? "" : text.ends_with('.') ? " " : ". ") + fix;
  return text;
}

Error::Error(ErrorCode code, std::string where_, std::string what_, std::string fix_)
    : std::runtime_error(join(where_, what_, fix_)),
      code(code),
      where(std::move(where_)),
      problem(std::move(what_)),
      fix(std::move(fix_)) {}

void check_failed(const char* expression, const std::string& message, std::source_location location) {
  std::string_view file = location.file_name();  // as the compiler was given it: the path in this project is enough
  if (const size_t at = file.rfind("/concerto/"); at != std::string_view::npos) file.remove_prefix(at + 1);
  throw Bug(fmt::format("internal error at {}:{} ({}): CHECK({}) failed{}{}", file, location.line(),
                        location.function_name(), expression, message.empty() ? "" : ": ", message));
}

}  // namespace concerto
