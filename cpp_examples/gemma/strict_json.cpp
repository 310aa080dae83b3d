#include "strict_json.h"

#include <set>
#include <vector>

#include "error.h"

namespace gemma {

using nlohmann::json;

json parse_object(const std::string& text, const std::string& where) {
  // The parser keeps the last of two equal keys; a file that says two things about one tensor is refused instead.
  std::vector<std::set<std::string>> keys;
  const auto callback = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      fail(where, ": the key ", parsed.dump(), " is there twice");
    }
    return true;
  };
  json object;
  try {
    object = json::parse(text, callback);
  } catch (const json::exception& error) {
    fail(where, ": not valid JSON: ", error.what());
  }
  if (!object.is_object()) fail(where, ": a JSON object is needed, this is of type ", object.type_name());
  return object;
}

}  // namespace gemma
