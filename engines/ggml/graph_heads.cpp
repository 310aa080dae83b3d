// Queries, keys and values of the same tokens: the rotations of the first two and the rows of a cache that the third go
// to become one call where they follow one another, as llama.cpp has them in front of each attention.
#include "graph_plan.hpp"
#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// The work as a rotation without a norm and without rows, if it is one.
bool as_rotation(const Host& host, const Work& work, RotationWork& rotation) {
  if (work.kind == Work::Kind::Rotation) {
    rotation = work.rotation;
    return true;
  }
  if (work.kind != Work::Kind::Node || host.op(*work.node) != Op::Rope) return false;
  rotation.rope = rotation.output = work.node;
  rotation.input = work.node->source[0];
  return fits_one_call(host, rotation);
}

// Whether both turn heads of one width by the same angles.
bool turn_alike(const RotationWork& one, const RotationWork& other) {
  const Tensor &a = *one.rope, &b = *other.rope;
  return a.source[1] == b.source[1] && a.source[2] == b.source[2] &&
         std::memcmp(a.parameters, b.parameters, sizeof a.parameters) == 0 && a.ne[0] == b.ne[0] &&
         a.ne[2] == b.ne[2] && a.ne[3] == 1 && b.ne[3] == 1 &&
         (one.weight == nullptr || other.weight == nullptr || one.epsilon == other.epsilon);
}

// The node as heads of the rotation's width that go to rows of a cache.
bool as_rows(const Host& host, const Work& work, const RotationWork& rotation, HeadRows& values) {
  if (work.kind != Work::Kind::Node || host.op(*work.node) != Op::SetRows) return false;
  const Tensor &cache = *work.node, &from = *cache.source[0], &rows = *cache.source[1];
  const int64_t head_dim = rotation.rope->ne[0], tokens = rotation.rope->ne[2];
  if (!is_float(cache.type) || !has_rows(cache) || !has_element_strides(cache) || cache.ne[2] != 1 || cache.ne[3] != 1)
    return false;
  if (!is_float(from.type) || !is_contiguous(from) || from.ne[1] != tokens || from.ne[2] != 1 || from.ne[3] != 1)
    return false;
  if (from.ne[0] % head_dim != 0 || (rows.type != TYPE_I32 && rows.type != TYPE_I64)) return false;
  if (rows.ne[0] != tokens || rows.ne[1] != 1 || rows.ne[2] != 1 || rows.ne[3] != 1) return false;
  values = {&from, &cache, &rows};
  return are_apart(from, cache) && are_apart(rows, cache);
}

// Whether what one kind writes is nothing that another reads or writes.
bool are_apart_from(const Tensor& written, std::initializer_list<const Tensor*> others) {
  for (const Tensor* other : others) {
    if (other != nullptr && !are_apart(*other, written)) return false;
  }
  return true;
}

}  // namespace

void GraphPlan::join_heads() {
  std::vector<Work> joined;
  for (size_t place = 0; place < works_.size(); ++place) {
    joined.push_back(works_[place]);
    RotationWork queries, keys;
    if (place + 1 >= works_.size() || !as_rotation(*host_, works_[place], queries) || queries.rows != nullptr) continue;
    if (!as_rotation(*host_, works_[place + 1], keys) || !turn_alike(queries, keys)) continue;
    if (!are_apart_from(*queries.output, {keys.input, keys.output, keys.rows, keys.weight})) continue;
    if (!are_apart_from(*keys.output, {queries.input, queries.weight})) continue;
    Work& work = joined.back();
    work.kind = Work::Kind::Rotation;
    work.rotation = queries;
    work.keys = keys;
    ++place;
    HeadRows values;
    if (place + 1 >= works_.size() || !as_rows(*host_, works_[place + 1], queries, values)) continue;
    if (!are_apart_from(*values.cache, {queries.input, queries.output, queries.weight, keys.input, keys.output,
                                        keys.rows, keys.weight, queries.rope->source[1], queries.rope->source[2]}) ||
        !are_apart_from(*queries.output, {values.input, values.rows}) ||
        !are_apart_from(*keys.output, {values.input, values.rows})) {
      continue;
    }
    work.values = values;
    ++place;
  }
  works_ = std::move(joined);
}

}  // namespace nvb_ggml
