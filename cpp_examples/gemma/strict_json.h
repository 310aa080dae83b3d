// JSON from files that are not trusted.
#ifndef GEMMA_STRICT_JSON_H
#define GEMMA_STRICT_JSON_H

#include <nlohmann/json.hpp>
#include <string>

namespace gemma {

// Parses one JSON object, in time that is linear in the text. `where` names it in errors: bad syntax or UTF-8, a key
// given twice, more than 64 levels of arrays and objects in each other, anything but an object.
nlohmann::json parse_object(const std::string& text, const std::string& where);

}  // namespace gemma

#endif  // GEMMA_STRICT_JSON_H
