#include "strict_json.h"

#include <utility>
#include <vector>

#include "error.h"

namespace gemma {
namespace {

using nlohmann::json;

// The library copies, compares and writes a value by recursion, which a file could take past the end of the stack. The
// files of models nest four levels.
constexpr size_t kMaxDepth = 64;

// Builds the value from the parser's events. The library's own builder keeps the last of two equal keys, and with a
// callback, which could refuse them, it visits all the members of an object again after each of them.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const std::string& where) : where_(where) {}

  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(json::number_integer_t value) override { return add(value); }
  bool number_unsigned(json::number_unsigned_t value) override { return add(value); }
  bool number_float(json::number_float_t value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(json::binary_t& value) override { return add(std::move(value)); }  // no text has any

  bool start_object(size_t) override { return open(json::object()); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    const auto [member, added] = open_.back()->get_ref<json::object_t&>().emplace(name, nullptr);
    // A file that says two things about one tensor is refused.
    if (!added) fail(where_, ": the key ", json(name).dump(), " is there twice");
    member_ = &member->second;
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    fail(where_, ": not valid JSON: ", error.what());
  }

 private:
  // Puts a value where the parser stands: at the root, at the end of the open array, or at the key of the open object.
  json* place(json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    json::array_t& array = open_.back()->get_ref<json::array_t&>();
    array.push_back(std::move(value));
    return &array.back();
  }

  bool add(json value) {
    place(std::move(value));
    return true;
  }

  bool open(json value) {
    if (open_.size() == kMaxDepth) fail(where_, ": JSON that nests more than ", kMaxDepth, " levels");
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& where_;
  json root_;
  std::vector<json*> open_;  // arrays and objects that have begun; one grows only while it is the last
  json* member_ = nullptr;   // the value of the key that was read last
};

}  // namespace

json parse_object(const std::string& text, const std::string& where) {
  Builder builder(where);
  json::sax_parse(text, &builder);
  json object = builder.take();
  if (!object.is_object()) fail(where, ": a JSON object is needed, this is of type ", object.type_name());
  return object;
}

}  // namespace gemma
