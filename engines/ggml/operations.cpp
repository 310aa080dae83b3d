// Which function does which of the host's operations.
#include "operations.hpp"

#include <cstdlib>
#include <string>

#include "tensor.hpp"

namespace nvb_ggml {
namespace {

bool take(Step& step, const Tensor& node) {
  const Host& host = step.device.host();
  switch (host.op(node)) {
    case Op::None:
      return true;
    case Op::Add:
      return binary(step, node, NVB_POINTWISE_ADD);
    case Op::AddId:
      return add_id(step, node);
    case Op::ArgMax:
      return arg_max(step, node);
    case Op::ArgSort:
      return sort_rows(step, node, node.parameters[0] != 0);
    case Op::Clamp:
      return clamp(step, node);
    case Op::Concat:
      return concat(step, node);
    case Op::Cont:
    case Op::Copy:
    case Op::Dup:
      return copy(step, node);
    case Op::Div:
      return binary(step, node, NVB_POINTWISE_DIVIDE);
    case Op::FlashAttention:
      return flash_attention(step, node);
    case Op::GetRows:
      return get_rows(step, node);
    case Op::Glu:
      return gated_activation(step, node);
    case Op::L2Norm:
      return l2_norm(step, node);
    case Op::MatMul:
      return mat_mul(step, node);
    case Op::MatMulId:
      return mat_mul_id(step, node);
    case Op::Mean:
      return sum_rows(step, node, true);
    case Op::Mul:
      return binary(step, node, NVB_POINTWISE_MULTIPLY);
    case Op::Norm:
      return norm(step, node);
    case Op::Repeat:
      return repeat(step, node);
    case Op::RmsNorm:
      return rms_norm(step, node);
    case Op::Rope:
      return rope(step, node);
    case Op::Scale:
      return scale(step, node);
    case Op::SetRows:
      return set_rows(step, node);
    case Op::SoftMax:
      return soft_max(step, node);
    case Op::Sqr:
      return unary(step, node, NVB_POINTWISE_SQUARE);
    case Op::Sqrt:
      return unary(step, node, NVB_POINTWISE_SQUARE_ROOT);
    case Op::Sub:
      return binary(step, node, NVB_POINTWISE_SUBTRACT);
    case Op::SumRows:
      return sum_rows(step, node, false);
    case Op::TopK:
      return sort_rows(step, node, true);
    case Op::Unary:
      return unary(step, node);
    default:
      return false;
  }
}

// Whether tests leave the operation to the host: NVB_GGML_REFUSE has names with commas between them.
bool is_refused(const char* name) {
  static const std::string refused = [] {
    const char* names = std::getenv("NVB_GGML_REFUSE");
    return names == nullptr ? std::string() : ',' + std::string(names) + ',';
  }();
  return !refused.empty() && refused.find(',' + std::string(name) + ',') != std::string::npos;
}

// Operations of fewer rows than this read the weight about as often as a copy of it would.
constexpr int64_t kLeastRowsToOffload = 32;

}  // namespace

bool supports_operation(DeviceState& device, const Tensor& node) {
  if (is_refused(device.host().op_name(node))) return false;
  Step step(device, nullptr, nullptr);
  return take(step, node);
}

bool is_worth_offloading(DeviceState& device, const Tensor& node) {
  const Op op = device.host().op(node);
  if (op == Op::MatMulId) return node.ne[2] >= kLeastRowsToOffload;
  return op == Op::MatMul && node.ne[1] * node.ne[2] * node.ne[3] >= kLeastRowsToOffload;
}

nvb_status run_operation(DeviceState& device, nvb_stream* stream, Scratch& scratch, const Tensor& node) {
  Step step(device, stream, &scratch);
  if (!take(step, node)) {
    device.host().log(LOG_ERROR, "nvbackend: %s was not accepted and is asked for\n", device.host().op_name(node));
    return NVB_ERROR_UNSUPPORTED;
  }
  return step.status();
}

}  // namespace nvb_ggml
