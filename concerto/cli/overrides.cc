#include "concerto/cli/overrides.h"

#include <algorithm>
#include <cctype>

#include "concerto/base/error.h"

namespace concerto {
namespace {

bool is_key(const std::string& text) {
  return !text.empty() && std::isalpha(static_cast<unsigned char>(text[0])) && text.back() != '.' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; });
}

}  // namespace

Overrides parse_overrides(const std::vector<std::string>& arguments) {
  Overrides overrides;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.find('=');
    const std::string key =
        argument.starts_with("--") ? argument.substr(2, equals == std::string::npos ? equals : equals - 2) : "";
    if (!is_key(key)) throw Error(ErrorCode::kUsage, argument, "not a setting", "Write --section.key=value");
    if (equals != std::string::npos) {
      overrides.emplace_back(key, argument.substr(equals + 1));
    } else if (i + 1 < arguments.size() && !arguments[i + 1].starts_with("--")) {
      overrides.emplace_back(key, arguments[++i]);
    } else {
      const bool is_setting = key.find('.') != std::string::npos;
      throw Error(ErrorCode::kUsage, argument, is_setting ? "has no value" : "neither an option nor a setting",
                  is_setting ? "Write --" + key + "=value" : "Settings are written --section.key=value");
    }
  }
  return overrides;
}

}  // namespace concerto
