// Strict JSON for files that come from outside: what nlohmann::json accepts but a careful reader must not (duplicate
// names, endless nesting) is an error, and every error is an Error that names the file.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

#include "concerto/base/error.h"

namespace concerto {

// Error(code, where, ...) for a syntax error, invalid UTF-8, a name given twice in one object, or nesting deeper than
// max_depth.
nlohmann::json parse_json(std::string_view text, ErrorCode code, const std::string& where, int max_depth = 64);

// What a JSON library's message says, for people: without its tags, cut to 200 bytes of plain text.
std::string json_fault(const std::string& message);

// The text in double quotes, with JSON escapes; bytes that are not UTF-8 become U+FFFD.
std::string json_quote(std::string_view text);

}  // namespace concerto
