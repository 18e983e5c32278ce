#include "concerto/base/json.h"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

namespace concerto {

using nlohmann::json;

std::string json_fault(const std::string& message) {
  const size_t end_of_tag = message.find("] ");
  std::string text = end_of_tag == std::string::npos ? message : message.substr(end_of_tag + 2);
  for (const std::string_view start : {"parse error at ", "line 1, "})
    if (text.starts_with(start)) text.erase(0, start.size());
  if (text.size() > 200) text = text.substr(0, 200) + "...";  // nlohmann quotes the whole last token
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  return text;
}

json parse_json(std::string_view text, ErrorCode code, const std::string& where, int max_depth) {
  std::vector<std::unordered_set<std::string>> names;  // of the objects that are open, outermost first
  const json::parser_callback_t callback = [&](int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= max_depth) throw Error(code, where, fmt::format("JSON is nested deeper than {} levels", max_depth));
      if (event == Event::object_start) names.emplace_back();
    } else if (event == Event::object_end) {
      names.pop_back();
    } else if (event == Event::key) {
      if (!names.back().insert(value.get_ref<const std::string&>()).second)
        throw Error(code, where, "JSON name " + json_quote(value.get_ref<const std::string&>()) + " is given twice");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), callback);
  } catch (const json::exception& e) {
    throw Error(code, where, "not valid JSON: " + json_fault(e.what()));
  }
}

std::string json_quote(std::string_view text) {
  return json(std::string(text)).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace concerto
